"""When reward errors are reported, and when they end the run."""

import numpy as np
import pytest

from distflow.rewards.reward_results import CallCounts, RewardCounts, read_score, texts_of
from distflow.runtime.error_limits import ErrorShare, TooManyErrors, warn_of_errors


def test_what_was_counted_is_taken_once_with_the_first_failure():
    tally = CallCounts()
    for asked, failed, first in ((4, 0, ""), (4, 1, "one"), (0, 2, "other")):
        tally.add(RewardCounts(asked, failed, first, {"reward/calls": asked}))
    assert (
        tally.take() == RewardCounts(8, 3, "one", {"reward/calls": 8})
        and tally.take() == RewardCounts()
    )
    assert RewardCounts(8, 3).share == 0.375 and RewardCounts().share == 0.0


@pytest.mark.parametrize(
    ("failed", "limit", "stops"),
    [(50, 0.5, False), (51, 0.5, True), (100, 1.0, False), (1, 0.0, True)],
)
def test_more_than_the_limit_stops(failed, limit, stops):
    share = ErrorShare(limit, lambda message: None)
    if not stops:
        assert share.step(RewardCounts(100, failed), 1) == {
            "reward/calls": 100.0,
            "reward/error_rate": failed / 100,
        }
        return

    with pytest.raises(TooManyErrors, match=r"reward\.max_error_rate=.*\\x1b\[2J⏎so"):
        share.step(RewardCounts(100, failed, "\x1b[2J\nso"), 1)


def test_no_verdict_is_no_share():
    shown = list[str]()
    share = ErrorShare(0.0, lambda message: None, shown.append)
    assert share.step(RewardCounts(), 1) == {} and not shown


@pytest.mark.parametrize(
    ("failed", "warned"),
    [
        ([5, 6, 11, 12, 23], [False, True, False, True, False]),
        ([6, 5, 6, 0, 9], [True, False, True, False, True]),
    ],
)
def test_a_share_is_warned_of_once_and_when_it_has_doubled(failed, warned):
    """A validation, which has no share before it, warns of each above the same limit."""
    said = list[str]()
    share = ErrorShare(1.0, said.append)

    for number, is_warned in zip(failed, warned, strict=True):
        share.step(RewardCounts(100, number), 1)
        assert len(said) == is_warned
        said.clear()

        warn_of_errors(RewardCounts(100, number), said.append)
        assert len(said) == (number > 5)
        said.clear()


def test_values_that_cannot_be_stored_are_named_once():
    said = list[str]()
    share = ErrorShare(0.1, said.append)
    score = read_score({"score": 1, "n": np.int64(7), "odd": [object()]})
    assert score.extra["n"] == 7 and texts_of(score.extra) == {"odd": "object"}
    counts = RewardCounts(1, as_text={"own/odd": "object"})
    for step in (1, 2):
        share.step(RewardCounts.joined([counts, RewardCounts(1)]), step)
    assert len(said) == 1 and "'own/odd'" in said[0] and "type object" in said[0]
