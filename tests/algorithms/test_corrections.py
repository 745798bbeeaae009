"""Weights, rejection masks and figures of an engine that differs from the trainer."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distflow.algorithms.rollout_correction import (
    Correction,
    compute_rejection_mask,
    compute_rollout_weights,
    interpolate,
    mismatch_statistics,
    off_policy_sequence_mask,
    proximal_position,
)
from distflow.builtin_names import ROLLOUT_RS
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.algorithms.two_ranks import run_on_ranks
from tests.references import rollout_correction as reference

THRESHOLDS = (2.0, 1.2, (0.5, 2.0), (0.9, 1.1), (0.0, 1e-9))
BOUNDS = {"k1": ((None, 1.4), (0.9, 1.1)), "k2": ((None, 0.02),), "k3": ((None, 0.02),)}
RANKS = st.lists(st.booleans(), min_size=1, max_size=4)


def gaps_of(batch: Drawn) -> list[list[float]]:
    found = []
    for row in range(len(batch)):
        gap = batch.of_tokens(row, "old_log_probs") - batch.of_tokens(row, "rollout_log_probs")
        found.append(gap.tolist())
    return found


def columns_of(batch: Drawn, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    return batch["old_log_probs"][rows], batch["rollout_log_probs"][rows], batch.mask[rows]


def laid_out(batch: Drawn, rows: list[list[Any]]) -> Tensor:
    found = torch.zeros_like(batch.mask)
    for row, own in enumerate(rows):
        found[row][batch.mask[row] > 0] = torch.tensor(own, dtype=torch.float64)
    return found


@settings(max_examples=80)
@given(
    batch=batches(),
    level=st.sampled_from(("token", "sequence", "geometric")),
    threshold=st.sampled_from(THRESHOLDS),
    is_normalized=st.booleans(),
    first=RANKS,
)
def test_importance_weights_over_two_ranks(
    batch: Drawn, level: Any, threshold: Any, is_normalized: bool, first: list[bool]
) -> None:
    weights, stats = reference.importance_weights(gaps_of(batch), level, threshold, is_normalized)
    wanted = laid_out(batch, weights).float()
    shares = parts_of(batch, first)
    correction = Correction(level, threshold)

    def of_rank(rows: list[int]) -> Any:
        return lambda ranks: compute_rollout_weights(
            *columns_of(batch, rows), correction, batch_normalize=is_normalized, reduce=ranks
        )

    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        torch.testing.assert_close(found[0], wanted[rows], rtol=1e-6, atol=0.0)
        assert found[1] == pytest.approx(stats, rel=1e-9, abs=1e-12)


@settings(max_examples=100)
@given(
    batch=batches(),
    names=st.sets(st.sampled_from(ROLLOUT_RS), min_size=1),
    first=RANKS,
    data=st.data(),
)
def test_rejection_over_two_ranks(
    batch: Drawn, names: set[str], first: list[bool], data: Any
) -> None:
    chosen = sorted(names)
    bounds = [data.draw(st.sampled_from(BOUNDS[name[-2:]])) for name in chosen]
    kept, stats = reference.reject(gaps_of(batch), chosen, bounds)
    wanted = laid_out(batch, kept).float()
    shares = parts_of(batch, first)

    def of_rank(rows: list[int]) -> Any:
        return lambda ranks: compute_rejection_mask(
            *columns_of(batch, rows), rollout_rs=chosen, bounds=bounds, reduce=ranks
        )

    for rows, found in zip(shares, run_on_ranks([of_rank(rows) for rows in shares]), strict=True):
        assert torch.equal(found[0], wanted[rows])
        assert found[1] == pytest.approx(stats, rel=1e-9, abs=1e-12)


def test_bounds_are_inclusive() -> None:
    d = torch.tensor([[0.0, math.log(2.0), -math.log(2.0), 0.1]], dtype=torch.float64)
    arguments = (d, torch.zeros_like(d), torch.ones(1, 4))
    mask, _ = compute_rejection_mask(*arguments, rollout_rs=["token_k1"], bounds=[(0.5, 2.0)])
    assert mask.tolist() == [[1.0, 1.0, 1.0, 1.0]]
    mask, _ = compute_rejection_mask(*arguments, rollout_rs=["token_k1"], bounds=[(0.5, 1.5)])
    assert mask.tolist() == [[1.0, 1.0, 0.0, 1.0]]
    half = torch.tensor([[0.5]], dtype=torch.float64)
    mask, _ = compute_rejection_mask(
        half, torch.zeros(1, 1), torch.ones(1, 1), rollout_rs=["seq_max_k2"], bounds=[(None, 0.125)]
    )
    assert mask.tolist() == [[1.0]]
    edge = Correction("token", (1.0, 1.0)).weights(torch.zeros(1, 1), torch.zeros(1, 1), half)
    assert edge[1].tolist() == [[1.0]]


@settings(max_examples=40)
@given(batch=batches(), first=RANKS)
def test_figures_of_the_mismatch_over_two_ranks(batch: Drawn, first: list[bool]) -> None:
    gaps = [gap for row in gaps_of(batch) for gap in row]
    shares = parts_of(batch, first)

    def of_rank(rows: list[int]) -> Any:
        return lambda ranks: mismatch_statistics(*columns_of(batch, rows), ranks)

    for found in run_on_ranks([of_rank(rows) for rows in shares]):
        assert found == pytest.approx(reference.mismatch(gaps), rel=1e-9, abs=1e-12)


@given(batch=batches(), threshold=st.sampled_from((0.05, 0.5)))
def test_the_off_policy_mask(batch: Drawn, threshold: float) -> None:
    log_probs = batch["old_log_probs"].clone().requires_grad_()
    found = off_policy_sequence_mask(
        log_probs, batch["rollout_log_probs"], batch["advantages"], batch.mask, threshold
    )
    assert not found.requires_grad and found.dtype is torch.float64

    for row, gaps in enumerate(gaps_of(batch)):
        if not gaps:
            continue
        advantages = batch.of_tokens(row, "advantages").tolist()
        kept = reference.keep_on_policy(gaps, advantages, threshold)
        assert (found[row][batch.mask[row] > 0] == 1.0).tolist() == kept


def test_the_off_policy_mask_at_its_bound() -> None:
    log_probs = torch.tensor([[-1.0, -3.0]])
    rollout = torch.tensor([[-1.0, -2.0]])
    advantages = torch.tensor([[-1.0, 0.0]])

    for threshold, kept in ((0.5, [[1.0, 1.0]]), (0.49, [[0.0, 1.0]])):
        found = off_policy_sequence_mask(
            log_probs, rollout, advantages, torch.ones(1, 2), threshold
        )
        assert found.tolist() == kept


@given(batch=batches(), step=st.integers(0, 5), data=st.data())
def test_the_proximal_policy_between_two_versions(batch: Drawn, step: int, data: Any) -> None:
    shape = batch.mask.shape
    versions = torch.tensor(
        data.draw(st.lists(st.integers(-1, step + 1), min_size=shape[1], max_size=shape[1]))
    ).expand(shape)
    alpha = proximal_position(versions, step)
    assert alpha.dtype is torch.float32
    now = batch["log_probs"].clone().requires_grad_()
    found = interpolate(now, batch["old_log_probs"], alpha)
    assert not found.requires_grad

    for row in range(len(batch)):
        for token in (batch.mask[row] > 0).nonzero()[:, 0].tolist():
            ends = float(batch["log_probs"][row, token]), float(batch["old_log_probs"][row, token])
            wanted = reference.proximal(*ends, int(versions[row, token]), step)
            assert float(found[row, token]) == pytest.approx(wanted, rel=1e-5, abs=1e-5)
