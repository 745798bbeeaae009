"""Rollout capacity: the rule by its formula and by hand, and waves at staleness 0."""

import pytest

from distflow.scheduling.admission import rollout_capacity


@pytest.mark.parametrize(
    ("max_concurrent", "running", "staleness", "version", "batch", "accepted", "expected"),
    [
        (64, 0, 0, 0, 32, 0, 32),  # the first step: one batch
        (16, 0, 0, 0, 32, 0, 16),  # bounded by concurrency
        (64, 64, 1, 0, 32, 0, 0),  # all of two steps run
        (64, 0, 0, 1, 32, 32, 32),  # the second step, the first consumed
        (64, 10, 1, 0, 32, 50, 4),  # 64 − 60
        (500, 10, 4, 3, 32, 100, 146),  # (4 + 3 + 1) · 32 − 110
        (8, 20, 4, 3, 32, 0, 0),  # more run than may
        (64, 0, 0, 0, 32, 64, 0),  # a resume with a smaller bound
    ],
)
def test_capacity(max_concurrent, running, staleness, version, batch, accepted, expected):
    assert (
        rollout_capacity(max_concurrent, running, staleness, version, batch, accepted) == expected
    )


@pytest.mark.parametrize(
    ("running", "accepted", "expected"), [(0, 0, 8), (1, 5, 0), (0, 5, 3), (0, 8, 0)]
)
def test_waves_open_only_when_nothing_runs_at_staleness_0(running, accepted, expected):
    assert rollout_capacity(64, running, 0, 0, 8, accepted) == expected
