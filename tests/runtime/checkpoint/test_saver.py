"""Saves of one process in the background: what they hold, when they are reported, and what a
failure does."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distflow.observe.writing.timing import Wait, Waits
from distflow.runtime.checkpoint.checkpoint_store import CheckpointError, CheckpointStore
from distflow.runtime.checkpoint.saver import Saver
from distflow.training.engine import OneRank


@dataclass
class Job:
    """What is saved, and what was told. at: called at points of the writing, on the thread that
    writes."""

    folder: Path
    weights: dict[str, Tensor] = field(
        default_factory=lambda: {"w": torch.zeros(4), "turned": torch.zeros(2, 3).t()}
    )
    kept: dict[str, list[int]] = field(default_factory=lambda: {"seen": []})
    at: dict[str, Callable[[], object]] = field(default_factory=dict)
    saved: list[tuple[int, bool, int]] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = CheckpointStore(
            self.folder, keep_last=1, on_point=lambda point: self.at.get(point, int)()
        )
        self.waits = Waits(self.ended)

    def saver(self) -> Saver:
        return Saver(self.store, OneRank(), self.told, waits=self.waits)

    def told(self, step: int, path: Path) -> None:
        self.saved.append((step, (path / "manifest.json").exists(), threading.get_ident()))

    def ended(self, wait: Wait, at: float) -> None:
        self.waited.append(wait.what)

    def until_waited_for(self) -> None:
        """Until the run has begun to wait."""
        until = time.monotonic() + 60
        while not self.waits.now() and not self.waited and time.monotonic() < until:
            time.sleep(0.001)

    def save(self, saver: Saver, step: int, wait: bool = False) -> None:
        saver.save(step, [("actor", self.weights), ("run", self.kept)], (), wait=wait)

    def learn(self, step: int) -> None:
        """Changes all that is saved, in place."""
        for tensor in self.weights.values():
            tensor.fill_(step)
        self.kept["seen"].append(step)

    def steps(self) -> list[int]:
        """Whose checkpoints are whole, each with what there was at the end of its step; nothing
        else is there."""
        names = sorted(path.name for path in self.folder.iterdir())
        steps = [int(name.removeprefix("step-")) for name in names]
        for step in steps:
            checkpoint = self.store.load(step)
            assert checkpoint.load("run") == {"seen": list(range(1, step + 1))}
            for name, tensor in checkpoint.load("actor").items():
                assert torch.equal(tensor, torch.full_like(self.weights[name], step)), name

        return steps


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path / "checkpoints")


def full() -> None:
    raise OSError(28, "No space left on device")


def test_the_run_goes_on_while_what_it_had_is_written(job):
    job.at["part actor"] = job.until_waited_for
    with job.saver() as saver:
        job.learn(1)
        job.save(saver, 1)
        job.learn(2)
        saver.check()
        assert saver.is_busy and not job.saved and not job.store.exists()
        job.save(saver, 2, wait=True)
        assert [entry[:2] for entry in job.saved] == [(1, True), (2, True)] and not saver.is_busy

    assert job.steps() == [2], "the newest alone is kept"
    assert job.waited == ["checkpoint of step 1"]
    assert {thread for *_, thread in job.saved} == {threading.get_ident()}


@pytest.mark.parametrize("point", ["part run", "manifest"])
@pytest.mark.parametrize("told_by", ["check", "save", "leaving"])
def test_a_write_that_fails_is_raised_and_costs_nothing_that_was_saved(job, point, told_by):
    def go_on(saver: Saver) -> None:
        while told_by == "check":
            saver.check()
        if told_by == "save":
            job.save(saver, 3)

    why = "the checkpoint of step 2 could not be written to .*: the disk is full"
    with pytest.raises(CheckpointError, match=why), job.saver() as saver:
        job.learn(1)
        job.save(saver, 1, wait=True)
        job.at[point] = full
        job.learn(2)
        job.save(saver, 2)
        go_on(saver)

    assert [entry[0] for entry in job.saved] == [1] and job.steps() == [1]


def test_an_error_waits_for_the_save_and_stays_the_one_that_is_raised(job):
    with pytest.raises(ZeroDivisionError), job.saver() as saver:
        job.learn(1)
        job.save(saver, 1)
        raise ZeroDivisionError

    assert job.steps() == [1]
    job.at["part run"] = full

    with pytest.raises(ZeroDivisionError), job.saver() as saver:
        job.learn(2)
        job.save(saver, 2)
        raise ZeroDivisionError

    assert job.steps() == [1]
