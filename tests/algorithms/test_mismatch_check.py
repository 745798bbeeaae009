"""Engine and trainer: figures against plain sums, limits, and the cause that is named."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import distflow.pipelines.nodes.updates  # noqa: F401  # declares `trainer_log_probs`
from distflow.algorithms.mismatch_check import Tolerance, check_mismatch
from distflow.data.batch import Batch
from distflow.errors import TrustError
from tests.algorithms.batches import Drawn, batches, parts_of
from tests.algorithms.two_ranks import Ranks, run_on_ranks
from tests.checks.batches import sampled_batch
from tests.references import rollout_correction as reference

EXACT, ROUNDED = Tolerance.of(exact=True), Tolerance.of(exact=False)


STEP = 3
COLUMNS = ("trainer_log_probs", "prox_log_probs", "old_log_probs")
"""Of the trainer, the first that there is."""


def batch_of(drawn: Drawn, rows: list[int], versions: list[int], trainer: str) -> Batch:
    """versions: of the tokens by their place in a response. Samples without a score are not
    scored by a trainer with a column of its own."""
    bs = len(rows)
    length = drawn.mask.shape[1] if rows else 0

    def of_rows(column: Tensor) -> Tensor:
        return column[rows][:, :length]

    batch = Batch(torch.ones(bs, dtype=torch.int64), torch.full((bs,), length))
    batch["response_mask"] = of_rows(drawn.mask)
    batch["versions"] = torch.tensor(versions[:length]).expand(bs, length)
    batch["rollout_log_probs"] = of_rows(drawn["rollout_log_probs"])
    for name in COLUMNS[COLUMNS.index(trainer) :]:
        batch[name] = of_rows(drawn["log_probs" if name == trainer else "ref_log_prob"])

    if trainer == "trainer_log_probs":
        is_scored = drawn.valid[rows][:, None]
        batch[trainer] = batch[trainer].where(is_scored, math.nan)

    return batch


def figures(prefix: str, gaps: list[float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in reference.mismatch(gaps).items()}


@settings(max_examples=100)
@given(
    drawn=batches(),
    versions=st.lists(st.sampled_from((STEP, STEP, 2, 1)), min_size=6, max_size=6),
    keeps_kv=st.booleans(),
    trainer=st.sampled_from(COLUMNS),
    first=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_figures_by_cause_over_two_ranks(
    drawn: Drawn, versions: list[int], keeps_kv: bool, trainer: str, first: list[bool]
) -> None:
    gaps: dict[str, list[float]] = {}
    for row, own in enumerate(drawn.mask.tolist()):
        if trainer == "trainer_log_probs" and not drawn.valid[row]:
            continue

        begin = -1
        for token, counts in enumerate(own):
            if not counts:
                begin = -1
                continue

            begin = token if begin < 0 else begin
            cause = reference.cause(versions[token], versions[begin], STEP, keeps_kv)
            gap = drawn["log_probs"][row, token] - drawn["rollout_log_probs"][row, token]
            gaps.setdefault(cause, []).append(float(gap))

    every = [gap for own_gaps in gaps.values() for gap in own_gaps]
    wanted = dict[str, float]()
    if every:
        wanted = figures("mismatch", every)

    for cause, own_gaps in gaps.items():
        wanted |= figures(f"mismatch/{cause}", own_gaps)
        wanted[f"mismatch/{cause}/share"] = len(own_gaps) / len(every)

    def of_rank(rows: list[int]) -> Any:
        def call(ranks: Ranks) -> Any:
            batch = batch_of(drawn, rows, versions, trainer)
            return check_mismatch(batch, STEP, Tolerance(1e9, 1e9), keeps_kv=keeps_kv, reduce=ranks)

        return call

    for found, warning in run_on_ranks([of_rank(rows) for rows in parts_of(drawn, first)]):
        assert warning is None
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)


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
    assert "rollout_is=token weighs it out" in warning
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

    with pytest.raises(TrustError, match=r"by 0\.0009 .* 9 tokens .* by 0 .*rollout\.kv_on_update"):
        check_mismatch(batch, 4, EXACT, keeps_kv=False)


def test_the_limits_are_those_of_the_trainers_own_version() -> None:
    _, warning = check_mismatch(spans_an_update(0.6, of_now=5e-4), 4, EXACT)
    assert warning is not None and "differ by 0.0005" in warning
    assert "tokens of older weights" in warning
    with pytest.raises(TrustError, match=r"disagree by 0\.002 .* 0\.001\)"):
        check_mismatch(spans_an_update(0.0, of_now=2e-3), 4, EXACT)


def test_a_token_that_is_not_finite_in_a_scored_sample_is_told() -> None:
    batch = sampled_batch()
    scored = batch["old_log_probs"].clone()
    scored[1:] = math.nan
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
    with pytest.raises(TrustError, match="rollout_log_probs and old_log_probs .* moved by a token"):
        check_mismatch(batch, 4, tolerance)


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
