"""KL estimates, the penalty in the reward and its controller, against the references."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.algorithms.kl import adapted_coefficient, apply_kl_penalty, check_kl_type, kl_estimate
from distflow.builtin_names import KL_TYPES
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.algorithms.two_ranks import run_on_ranks
from tests.references import kl as reference

NAMES = (*KL_TYPES, *("k1", "k2", "k3", "k3+"))


@pytest.mark.parametrize("kind", NAMES)
@settings(max_examples=20)
@given(batch=batches())
def test_an_estimate_and_its_gradient(kind: str, batch: Drawn) -> None:
    own = batch["log_probs"][batch.mask > 0].requires_grad_()
    leaf = own.detach().clone().requires_grad_()
    ref = batch["ref_log_prob"][batch.mask > 0]
    found = kl_estimate(own, ref, kind)
    wanted = reference.kl(leaf, ref, kind)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    found.sum().backward()
    wanted.sum().backward()
    assert own.grad is not None and leaf.grad is not None
    torch.testing.assert_close(own.grad, leaf.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["k4", "low_var", "full+", ""])
def test_unknown_estimates_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind)
    with pytest.raises(ValueError, match="'full' .* low_var_kl is"):
        check_kl_type("full")


@settings(max_examples=60)
@given(
    batch=batches(),
    kind=st.sampled_from(KL_TYPES),
    mean=st.sampled_from(("token", "sequence")),
    first=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_the_penalty_in_the_reward_over_two_ranks(
    batch: Drawn, kind: str, mean: str, first: list[bool]
) -> None:
    shares = parts_of(batch, first)
    names = ("scores", "old_log_probs", "ref_log_prob")

    def of_rank(rows: list[int]) -> Any:
        columns = [batch[name][rows].float() for name in names]
        return lambda ranks: apply_kl_penalty(
            *columns,
            batch.mask[rows],
            batch.valid[rows],
            kl_coef=0.3,
            kl_penalty=kind,
            mean=mean,  # type: ignore[arg-type]
            reduce=ranks,
        )

    penalties = []
    for row in range(len(batch)):
        own = batch.of_tokens(row, "old_log_probs"), batch.of_tokens(row, "ref_log_prob")
        penalties.append(reference.kl(*own, kind))

    wanted = reference.mean_kl([penalties[row].tolist() for row in batch.rows()], mean)
    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        assert found[1] == pytest.approx(wanted, rel=1e-12, abs=1e-14)
        assert found[0].dtype is torch.float64
        assert not found[0][batch.mask[rows] == 0].any()

        for place, row in enumerate(rows):
            rewards = batch.of_tokens(row, "scores") - 0.3 * penalties[row]
            is_token = batch.mask[row] > 0
            torch.testing.assert_close(found[0][place][is_token], rewards, rtol=1e-12, atol=1e-12)


def test_without_valid_every_sample_counts() -> None:
    old = torch.tensor([[-1.0], [-3.0]])
    ref = torch.tensor([[-2.0], [-1.0]])
    zeros = torch.zeros(2, 1)
    _, mean = apply_kl_penalty(zeros, old, ref, torch.ones(2, 1), kl_coef=0.1)
    assert mean == -0.5


@given(
    kl=st.sampled_from((0.0, 0.05, 0.1, 0.11, 0.5, math.inf, math.nan)),
    num_samples=st.integers(1, 1000),
    coefficient=st.floats(0.0, 2.0),
)
def test_the_controller(kl: float, num_samples: int, coefficient: float) -> None:
    found = adapted_coefficient(coefficient, kl, num_samples, 0.1, 500.0)
    wanted = reference.next_coefficient(coefficient, kl, num_samples, 0.1, 500.0)
    assert found == pytest.approx(wanted, rel=1e-12)
