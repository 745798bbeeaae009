"""Engine and trainer: figures against plain sums, limits, and the cause that is named."""

import math

import pytest
import torch

from distflow.data.batch import Batch
from distflow.runtime.checks import TrustError
from distflow.runtime.checks.mismatch import Tolerance, check_mismatch, mismatch
from tests.runtime.checks.batches import sampled_batch

EXACT, ROUNDED = Tolerance.of(exact=True), Tolerance.of(exact=False)


def test_figures_against_plain_sums() -> None:
    rollout, trainer, counted = [-1.0, -2.0, -0.5, -9.0], [-1.5, -1.0, -0.5, 0.0], [1.0, 1.0, 1.0, 0.0]
    found = mismatch(*(torch.tensor(column) for column in (rollout, trainer, counted)))
    gaps = [b - a for a, b in zip(rollout[:3], trainer[:3], strict=True)]
    weights = [math.exp(gap) for gap in gaps]
    assert found == pytest.approx(
        {
            "mismatch/mean_abs": sum(map(abs, gaps)) / 3,
            "mismatch/max_abs": 1.0,
            "mismatch/k3": sum(w - 1 - g for w, g in zip(weights, gaps, strict=True)) / 3,
            "mismatch/ess": sum(weights) ** 2 / sum(w * w for w in weights) / 3,
        }
    )


def test_no_token_no_figures() -> None:
    nothing = torch.zeros(3)
    assert mismatch(nothing, nothing, nothing) == {}


def moved(batch: Batch, by: float) -> Batch:
    """The trainer's log-probs lie `by` away, up and down in turn."""
    rollout = batch.flat("rollout_log_probs")
    signs = torch.ones_like(rollout)
    signs[::2] = -1
    batch["old_log_probs"] = rollout + by * signs
    return batch


@pytest.mark.parametrize(
    ("tolerance", "fine", "warns", "holds"), [(EXACT, 5e-5, 5e-4, 2e-3), (ROUNDED, 0.01, 0.1, 0.6)]
)
def test_small_gaps_pass_larger_ones_warn_and_large_ones_hold_the_run(
    tolerance: Tolerance, fine: float, warns: float, holds: float
) -> None:
    metrics, warning = check_mismatch(moved(sampled_batch(), fine), 0, tolerance)
    assert warning is None and metrics["mismatch/mean_abs"] == pytest.approx(fine, rel=0.01)
    _, warning = check_mismatch(moved(sampled_batch(), warns), 0, tolerance)
    assert warning is not None and "(cause: numerics)" in warning
    with pytest.raises(TrustError, match="disagree by"):
        check_mismatch(moved(sampled_batch(), holds), 0, tolerance)


def test_tokens_of_older_weights_may_differ_more() -> None:
    metrics, warning = check_mismatch(moved(sampled_batch(version=3), 0.6), 4, EXACT)
    assert warning is not None and "(cause: staleness)" in warning and metrics["mismatch/mean_abs"] > 0.5


def test_answers_that_span_an_update_may_have_stale_kv() -> None:
    batch = moved(sampled_batch(version=3), 0.6)
    versions = batch["versions"]
    versions[0, 3:] = 4
    batch["versions"] = versions
    _, warning = check_mismatch(batch, 4, EXACT)
    assert warning is not None and "KV of older weights in answers that span an update" in warning


def test_truncated_sampling_is_named() -> None:
    batch = moved(sampled_batch(), 5e-4)
    batch["sampling_log_probs"] = batch.flat("rollout_log_probs") / 2
    _, warning = check_mismatch(batch, 0, EXACT)
    assert warning is not None and "another policy draws than is trained" in warning


@pytest.mark.parametrize("tolerance", [EXACT, ROUNDED])
@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("tool_tokens", [0, 2])
def test_a_shift_is_named_even_where_staleness_would_excuse_it(
    tolerance: Tolerance, shift: int, tool_tokens: int
) -> None:
    batch = sampled_batch(version=3, tool_tokens=tool_tokens)
    batch["old_log_probs"] = batch["rollout_log_probs"].roll(shift, dims=-1)
    with pytest.raises(TrustError, match="agree when one is moved by a token"):
        check_mismatch(batch, 4, tolerance)


def test_the_trainers_own_are_the_proximal_ones_where_there_are_two() -> None:
    batch = sampled_batch()
    batch["prox_log_probs"] = moved(sampled_batch(), 2e-3).flat("old_log_probs")
    with pytest.raises(TrustError, match="disagree by 0.002"):
        check_mismatch(batch, 0, EXACT)


def test_a_log_prob_that_is_not_finite_is_told_and_left_to_the_skipped_update() -> None:
    batch = sampled_batch()
    column = batch.flat("old_log_probs").clone()
    column[:2] = math.nan
    batch["old_log_probs"] = column
    metrics, warning = check_mismatch(batch, 0, EXACT)
    assert warning == "2 tokens have no finite log-prob by the trainer (old_log_probs)"
    assert metrics["mismatch/mean_abs"] == 0


def test_without_two_columns_nothing_is_compared() -> None:
    batch = sampled_batch()
    assert check_mismatch(batch.only(n for n in batch.names if n != "old_log_probs"), 0, EXACT) == ({}, None)
