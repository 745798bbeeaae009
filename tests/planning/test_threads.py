"""Threads of both planes: together the cores, each at least one, and what is given is kept."""

import os

import pytest

from distflow.planning.threads import share_threads, usable_cores


@pytest.mark.parametrize(
    ("cores", "trainer", "rollout", "shared"),
    [
        (1, None, None, (1, 1)),
        (2, None, None, (1, 1)),
        (3, None, None, (2, 1)),
        (16, None, None, (8, 8)),
        (16, None, 5, (11, 5)),
        (16, 12, None, (12, 4)),
        (4, None, 9, (1, 9)),
        (4, 9, None, (9, 1)),
        (4, 3, 3, (3, 3)),
    ],
)
def test_the_cores_are_shared(cores: int, trainer: int | None, rollout: int | None, shared: tuple[int, int]) -> None:
    assert share_threads(cores, trainer, rollout) == shared


def test_the_environment_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound, cores in (("1", 1), ("100000", len(os.sched_getaffinity(0))), ("none", len(os.sched_getaffinity(0)))):
        monkeypatch.setenv("OMP_NUM_THREADS", bound)
        assert usable_cores() == cores
