"""Credits: the capacity rule by its formula and by hand, and waves at staleness 0."""

import pytest

from distflow.scheduling.rollout_capacity import RolloutCapacity, capacity


@pytest.mark.parametrize(
    ("max_concurrent", "running", "staleness", "version", "batch", "accepted", "expected"),
    [
        (64, 0, 0, 0, 32, 0, 32),  # the first step: one batch
        (16, 0, 0, 0, 32, 0, 16),  # bounded by concurrency
        (64, 32, 0, 0, 32, 0, 0),  # all of the step run
        (64, 0, 0, 1, 32, 32, 32),  # the second step, the first consumed
        (64, 10, 0, 1, 32, 50, 4),  # 64 − 60
        (500, 10, 4, 3, 32, 100, 146),  # (4 + 3 + 1) · 32 − 110
        (8, 20, 4, 3, 32, 0, -12),  # more run than may: negative
        (64, 0, 0, 0, 32, 64, -32),  # a resume with a smaller bound
        (0, 0, 0, 0, 0, 0, 1),  # both sizes count as at least 1
    ],
)
def test_capacity(max_concurrent, running, staleness, version, batch, accepted, expected):
    assert capacity(max_concurrent, running, staleness, version, batch, accepted) == expected


def test_waves_open_only_when_nothing_runs_at_staleness_0():
    credits = RolloutCapacity(max_concurrent=64, max_staleness=0, consumer_batch=8)
    assert credits.open(running=0, version=0, accepted=0) == 8
    assert credits.open(running=1, version=0, accepted=5) == 0
    assert credits.open(running=0, version=0, accepted=5) == 3
    assert credits.open(running=0, version=0, accepted=8) == 0


def test_credits_flow_freely_where_staleness_is_allowed():
    credits = RolloutCapacity(max_concurrent=64, max_staleness=1, consumer_batch=8)
    assert credits.open(running=3, version=0, accepted=5) == 8
    assert credits.open(running=8, version=0, accepted=9) == 0
