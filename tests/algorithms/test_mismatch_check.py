"""Engine and trainer: figures against plain sums, limits, and the cause that is named."""

import math

import pytest
import torch

from distflow.algorithms.mismatch_check import Tolerance, causes, check_mismatch, mismatch
from distflow.data.batch import Batch
from distflow.errors import TrustError
from tests.checks.batches import sampled_batch

EXACT, ROUNDED = Tolerance.of(exact=True), Tolerance.of(exact=False)


def test_figures_against_plain_sums() -> None:
    rollout = [-1.0, -2.0, -0.5, -9.0]
    trainer = [-1.5, -1.0, -0.5, 0.0]
    counted = [1.0, 1.0, 1.0, 0.0]
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
    metrics, warning = check_mismatch(moved(sampled_batch(version=3), 0.6), 4, EXACT, stops=True)
    assert (
        warning is None
        and metrics["mismatch/older_version/mean_abs"] == metrics["mismatch/mean_abs"] > 0.5
    )
    assert (
        metrics["mismatch/older_version/share"] == 1
        and "mismatch/same_version/mean_abs" not in metrics
    )


def spans_an_update(by: float, of_now: float = 0.0) -> Batch:
    """Step 4: in the first answer the last tokens were made by version 4 behind those of 3; the
    last is of 4 alone."""
    batch = moved(sampled_batch(version=3), by)
    versions = batch["versions"]
    versions[0, 3:5] = versions[3, :6] = 4
    batch["versions"] = versions
    trainer = batch["old_log_probs"]
    trainer[3] = batch["rollout_log_probs"][3] + of_now
    batch["old_log_probs"] = trainer

    return batch


def test_keys_and_values_that_were_made_anew_are_no_cause() -> None:
    metrics, _ = check_mismatch(spans_an_update(0.0), 4, EXACT, keeps_kv=False)
    shares = {
        name: metrics.get(f"mismatch/{name}/share")
        for name in ("same_version", "older_version", "older_kv")
    }
    assert shares == {"same_version": 0.5, "older_version": 0.5, "older_kv": None}


def test_keys_and_values_that_should_be_made_anew_and_were_not() -> None:
    """Tokens of the trainer's weights behind a weight sync, against others of the same weights."""
    batch = sampled_batch(version=3)
    versions = batch["versions"]
    versions[:, 1:] = 4
    versions[2] = 4
    batch["versions"] = versions
    check_mismatch(moved(batch, 5e-5), 4, EXACT, keeps_kv=False)
    wrong = batch["rollout_log_probs"] + 9e-4 * (versions == 4)
    wrong[2] = batch["rollout_log_probs"][2]
    batch["old_log_probs"] = wrong
    check_mismatch(batch, 4, EXACT)

    with pytest.raises(
        TrustError, match=r"0\.0009 nats a token on \d+ tokens behind a weight sync, and by \S+ on"
    ):
        check_mismatch(batch, 4, EXACT, keeps_kv=False)


def test_the_limits_are_those_of_the_trainers_own_version() -> None:
    _, warning = check_mismatch(spans_an_update(0.6, of_now=5e-4), 4, EXACT)
    assert warning is not None and "differ by 0.0005" in warning
    assert "tokens of older weights" in warning
    with pytest.raises(TrustError, match=r"disagree by 0\.002 .* on the same weights"):
        check_mismatch(spans_an_update(0.0, of_now=2e-3), 4, EXACT)


def test_what_was_read_anew_between_two_turns_is_over_no_older_kv() -> None:
    made = torch.tensor([[1, 1, 0, 1, 1, 1]])
    versions = torch.tensor([[3, 3, -1, 4, 4, 5]])
    found = causes(versions, made, 5)
    assert found["older_version"].tolist() == [[True, True, False, True, True, False]]
    assert found["older_kv"].tolist() == [[False, False, False, False, False, True]]
    assert not found["same_version"].any()


def test_samples_that_were_not_scored_are_in_no_figure() -> None:
    batch = moved(sampled_batch(), 5e-5)
    scored = batch["old_log_probs"].clone()
    scored[1:] = math.nan
    batch["trainer_log_probs"] = scored
    batch["old_log_probs"] = batch.flat("rollout_log_probs")
    metrics, warning = check_mismatch(batch, 0, EXACT)
    assert warning is None and metrics["mismatch/mean_abs"] == pytest.approx(5e-5, rel=0.01)
    scored[0, 1] = math.nan
    batch["trainer_log_probs"] = scored
    assert (
        check_mismatch(batch, 0, EXACT)[1]
        == "1 tokens have no finite log-prob by the trainer (trainer_log_probs)"
    )


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
    assert check_mismatch(batch.only(n for n in batch.names if n != "old_log_probs"), 0, EXACT) == (
        {},
        None,
    )
