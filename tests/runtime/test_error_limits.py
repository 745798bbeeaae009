"""When reward errors are reported, and when they end the run."""

import pytest

from distflow.rewards.reward_results import CallCounts, RewardCounts
from distflow.runtime.error_limits import ErrorShare, TooManyErrors, warn_of_errors
from distflow.runtime.run_errors import repair_advice


def test_what_was_counted_is_taken_once_with_the_first_failure() -> None:
    tally = CallCounts()
    for asked, failed, first in ((4, 0, ""), (4, 1, "one"), (0, 2, "other")):
        tally.add(RewardCounts(asked, failed, first, {"reward/calls": asked}))
    assert (
        tally.take() == RewardCounts(8, 3, "one", {"reward/calls": 8})
        and tally.take() == RewardCounts()
    )
    assert RewardCounts(8, 3).share == 0.375 and RewardCounts().share == 0.0


def test_a_share_is_told_when_it_begins_and_when_it_doubles() -> None:
    said: list[str] = []
    share = ErrorShare(1.0, said.append)
    told = []
    for step, failed in enumerate((0, 5, 6, 8, 11, 12, 30, 24, 5, 6), 1):
        share.step(RewardCounts(100, failed, "it broke"), step)
        told.append(len(said))
    assert told == [0, 0, 1, 1, 1, 2, 3, 3, 3, 4]
    assert (
        said[0].startswith("6 of 100 scores are reward errors (6%) at step 3; ")
        and "The first error was: it broke" in said[0]
    )


@pytest.mark.parametrize(
    ("first", "advice"),
    [
        ("custom: it returned None", "Correct the named function (custom_reward_function.path, "),
        ("custom: no score within 3 s", "(data.answer_key); if it is slow, raise reward.timeout_s"),
        (
            "workflow mine: KeyError: 'x' (at mine.py:3)",
            "Correct the workflow (actor_rollout_ref.rollout.workflow, ",
        ),
        (
            "workflow mine: an episode did not end within 10 s (reward.timeout_s)",
            "; if it is slow, raise",
        ),
        (
            "custom: ValueError: no workflow within the row (at mine.py:3)",
            "Correct the named function",
        ),
    ],
)
def test_the_advice_is_for_what_failed(first: str, advice: str) -> None:
    assert advice in repair_advice(first)
    assert ("if it is slow" in repair_advice(first)) == (
        "within 3 s" in first or "timeout_s" in first
    )


@pytest.mark.parametrize(
    ("failed", "limit", "stops"),
    [(50, 0.5, False), (51, 0.5, True), (100, 1.0, False), (1, 0.0, True)],
)
def test_more_than_the_limit_stops(failed: int, limit: float, stops: bool) -> None:
    share = ErrorShare(limit, lambda message: None)
    if not stops:
        assert share.step(RewardCounts(100, failed), 1) == {
            "reward/calls": 100.0,
            "reward/error_rate": failed / 100,
        }
        return
    with pytest.raises(TooManyErrors, match=r"more than reward.max_error_rate=.*\\x1b\[2J⏎so"):
        share.step(RewardCounts(100, failed, "\x1b[2J\nso"), 1)


def test_no_verdict_is_no_share() -> None:
    assert ErrorShare(0.0, lambda message: None).step(RewardCounts(), 1) == {}


def test_a_validation_is_only_told() -> None:
    said: list[str] = []
    for failed in (5, 6, 100):
        warn_of_errors(RewardCounts(100, failed, "it broke"), said.append)
    assert len(said) == 2 and "in a validation, and count as wrong" in said[0]
