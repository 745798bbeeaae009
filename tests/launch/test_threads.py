"""Threads of both planes: together the cores, each at least one, and what is given is kept."""

import os
from pathlib import Path

import pytest

from distflow.launch import threads
from distflow.launch.threads import own_cores, share_threads, usable_cores


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
def test_the_cores_are_shared(cores, trainer, rollout, shared):
    assert share_threads(cores, trainer, rollout) == shared


def test_the_environment_bounds_the_cores(monkeypatch):
    for bound, cores in (("1", 1), ("1,4", 1), ("100000", own_cores()), ("none", own_cores())):
        monkeypatch.setenv("OMP_NUM_THREADS", bound)
        assert usable_cores() == cores


def group(root: Path, limits: dict[str, str]) -> Path:
    for name, limit in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(limit)
    return root


@pytest.mark.parametrize(
    ("own", "limits", "granted"),
    [
        ("0::/", {"cpu.max": "max 100000"}, []),
        ("0::/", {"cpu.max": "250000 100000"}, [3]),
        ("0::/", {"cpu.max": "5000 100000"}, [1]),
        ("0::/pod/job", {"pod/cpu.max": "200000 100000", "pod/job/cpu.max": "max 100000"}, [2]),
        (
            "0::/pod/job",
            {"pod/cpu.max": "200000 100000", "pod/job/cpu.max": "100000 100000"},
            [1, 2],
        ),
        ("3:cpu:/job", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, [4]),
        ("3:cpu:/job", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("0::/", {}, []),
    ],
)
def test_a_container_grants_a_share_of_time(tmp_path, monkeypatch, own, limits, granted):
    root = group(tmp_path / "cgroup", limits)
    file = tmp_path / "own"
    file.write_text(own + "\n")
    assert sorted(threads._quotas(root, file)) == granted
    monkeypatch.setattr(threads, "_quotas", lambda *where: iter(granted))
    assert own_cores() == min([len(os.sched_getaffinity(0)), *granted])


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert list(threads._quotas(tmp_path, tmp_path / "none")) == []
