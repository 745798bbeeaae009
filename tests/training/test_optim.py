"""Optimizers by name, and their steps against formulas."""

import sys

import pytest
import torch
from torch import nn

from distflow.errors import UserError
from distflow.training.optimizer import make_optimizer


def stepped(name: str, **options) -> float:
    parameter = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = make_optimizer(name, [parameter], **options)
    for gradient in (0.5, -0.25):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
    return float(parameter.detach())


def test_adamw_takes_the_steps_of_its_paper():
    lr, decay, (b1, b2), eps = 0.1, 0.01, (0.9, 0.95), 1e-8
    x = 2.0
    m = 0.0
    v = 0.0
    for t, g in ((1, 0.5), (2, -0.25)):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        x = x - lr * decay * x - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)) ** 0.5 + eps)

    assert stepped("adamw", lr=lr, weight_decay=decay, betas=(b1, b2), eps=eps) == pytest.approx(
        x, abs=1e-12
    )


def test_sgd_has_decay_and_no_momentum():
    x = 2.0
    for g in (0.5, -0.25):
        x -= 0.1 * (g + 0.01 * x)
    assert stepped("sgd", lr=0.1, weight_decay=0.01) == pytest.approx(x, abs=1e-12)


def test_frozen_parameters_are_left_out():
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    trained = nn.Parameter(torch.zeros(1))
    assert make_optimizer("adamw", [frozen, trained], lr=1.0).param_groups[0]["params"] == [trained]
    with pytest.raises(UserError, match="no parameter .* gradient"):
        make_optimizer("adamw", [frozen], lr=1.0)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="adamw_8bit"):
        make_optimizer("adam", [nn.Parameter(torch.zeros(1))], lr=1.0)


def test_eight_bits_without_their_package_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match=r"distflow\[optim8bit\]"):
        make_optimizer("adamw_8bit", [nn.Parameter(torch.zeros(1))], lr=1.0)


def test_eight_bits_keep_moments_in_bytes_and_follow_adamw():
    pytest.importorskip("bitsandbytes")

    def train(name: str) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        parameter = nn.Parameter(torch.linspace(-1, 1, 128 * 128).reshape(128, 128))
        optimizer = make_optimizer(name, [parameter], lr=1e-2, weight_decay=0.0)

        for _ in range(20):
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return optimizer, parameter

    optimizer, compressed = train("adamw_8bit")
    moments = [
        entry for entry in optimizer.state[compressed].values() if isinstance(entry, torch.Tensor)
    ]
    assert any(
        moment.dtype == torch.uint8 and moment.shape == compressed.shape for moment in moments
    )
    _, exact = train("adamw")
    assert float((compressed - exact).detach().abs().mean()) < 0.01, (
        "20 steps of 0.01 moved a weight by about 0.2"
    )
