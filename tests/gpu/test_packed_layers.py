"""The layers of a training forward by kernels in Triton, in bfloat16, against float64."""

import copy

import pytest
import torch
from torch import Tensor

from distflow.models.native_layers import runs_natively
from distflow.models.packed_forward import (
    attach_packed_forward,
    packed_hidden_states,
)
from distflow.models.packed_layout import shared_prefixes
from tests.models.test_packed_layers import (
    LENGTHS,
    VARIANTS,
    distance,
    keep_from_native_code,
    tokens,
    trainable,
)

pytestmark = pytest.mark.gpu


def states_and_gradients(
    model: torch.nn.Module, ids: Tensor, shares: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    device = next(model.parameters()).device
    sharing = shared_prefixes(ids, LENGTHS) if shares else None
    with torch.autocast(device.type, torch.bfloat16, enabled=model.dtype == torch.float32):
        states = packed_hidden_states(model, ids.to(device), LENGTHS, sharing=sharing)
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(4)).to(states)
    model.zero_grad()
    (states * weights).sum().backward()

    return states.detach().cpu(), {
        name: p.grad.cpu()
        for name, p in model.named_parameters()
        if "lm_head" not in name and p.grad is not None
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_they_err_no_more_than_autocast(device, variant, shares, checkpointing):
    if device.type != "cuda":
        pytest.skip("wants a CUDA device: there are kernels for no other")
    family, changes = VARIANTS[variant]
    model = trainable(family, **changes)
    ids = tokens()
    plain = copy.deepcopy(model).to(device)
    exact = copy.deepcopy(model).double()
    model = model.to(device)
    for other in (plain, exact):
        attach_packed_forward(other)
    keep_from_native_code(plain)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    with torch.autocast("cuda", torch.bfloat16):
        head_dim = model.model.layers[0].self_attn.head_dim
        assert runs_natively(model.model) == (head_dim & (head_dim - 1) == 0) and not runs_natively(
            plain.model
        )

    ours, found = states_and_gradients(model, ids, shares)
    by_torch, theirs = states_and_gradients(plain, ids, shares)
    expected, wanted = states_and_gradients(exact, ids, shares=False)
    assert ours.dtype == torch.float32
    assert distance(ours, expected) < 1.5 * distance(by_torch, expected)
    for name, gradient in wanted.items():
        assert 0 < distance(found[name], gradient) < 1.5 * distance(theirs[name], gradient), name


def test_a_frozen_model_in_bfloat16_is_near_its_own_forward(device):
    if device.type != "cuda":
        pytest.skip("wants a CUDA device: there are kernels for no other")
    exact = trainable().eval()
    ids = tokens()
    model = copy.deepcopy(exact).to(device, torch.bfloat16)
    attach_packed_forward(model)
    plain = copy.deepcopy(model)
    attach_packed_forward(plain)
    keep_from_native_code(plain)
    assert runs_natively(model.model)

    with torch.no_grad():
        states = [
            packed_hidden_states(each, ids.to(device), LENGTHS).cpu() for each in (model, plain)
        ]
        expected = packed_hidden_states(exact, ids, LENGTHS)

    assert states[0].dtype == torch.bfloat16
    assert distance(states[0], expected) < 1.2 * distance(states[1], expected)
