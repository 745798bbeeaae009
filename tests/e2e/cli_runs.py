"""Runs of the command line in processes of their own, which tests kill, signal and start again."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from distflow import cli
from distflow.observe.run_reader import read_metrics
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.scheduling import ledger
from tests.forks import forks
from tests.ledger_audit import verify

DEADLINE_S = 300.0


class CliRun:
    """One start of `distflow`, with what it says going to `log`."""

    def __init__(
        self, log: Path, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._process = forks.Process(target=_main, args=(str(log), arguments, environment or {}))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def status(self) -> int:
        """Wait for the end: the exit status, negative for a signal."""
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, f"it did not end: {self.said()[-3000:]}"
        return self._process.exitcode

    def send(self, number: int) -> bool:
        """Whether it was there to be sent the signal."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> bool:
        """SIGKILL, and wait. Whether that is what ended it."""
        self.send(signal.SIGKILL)
        return self.status() == -signal.SIGKILL

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, condition: Any) -> None:
        """Until `condition()` holds; it must while the run is alive."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.running and time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.005)


def _main(log: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    tempfile.tempdir = None  # asked for again: the process that was forked knew another one
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` ignores it, and so would the run
    _show_on(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.setpgrp()
    sys.exit(cli.main(arguments))


def _show_on(out: int) -> None:
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def children_of(pid: int) -> list[int]:
    """All processes below `pid`, as /proc knows them, but the one that ends what they leave."""
    parents = {
        int(entry.name): parent for entry in _processes() if (parent := _parent(entry)) is not None
    }
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return [child for child in found[1:] if not _ends_survivors(child)]


def _ends_survivors(pid: int) -> bool:
    try:
        return b"distflow.processes.survivors" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and no mere zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X")


def _processes() -> Iterator[Path]:
    return (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


class Left:
    """What a run left in its folder: its newest checkpoint, and the timeline that survived."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = CheckpointStore(folder / "checkpoints").load()
        self.run: dict[str, Any] = self.checkpoint.load("run")

    def tensors(self) -> dict[str, Tensor]:
        """All of the newest checkpoint: weights and optimizer state of each role, groups in the
        queue."""
        files = sorted(self.checkpoint.path.glob("*.safetensors"))
        return {
            f"{file.stem}.{name}": tensor
            for file in files
            for name, tensor in load_file(file).items()
        }

    def values(self) -> dict[str, object]:
        """What else there is of each role and rank: counts of steps, random states."""
        parts = [
            part
            for part in self.checkpoint.files
            if part.endswith("_meta") or part.startswith("rank_")
        ]
        return {part: self.checkpoint.load(part) for part in parts}

    def metrics(self) -> dict[tuple[int, str], dict[str, float]]:
        """By step and kind, those that do not depend on time, memory or how far the rollout loop
        has got."""
        varying = (
            "timing_s/",
            "perf/",
            "throughput/",
            "memory/",
            "gpu/",
            "async/",
            "rollout_server/",
        )
        records = read_metrics(self.folder)
        assert len({(r.step, r.kind) for r in records}) == len(records), "a step was recorded twice"

        return {
            (record.step, record.kind): {
                k: v for k, v in record.values.items() if not k.startswith(varying)
            }
            for record in records
        }

    def group_counts(self) -> dict[str, Any]:
        """Counts of prompt groups, as the journal has them; raises where it moves a group as no run
        can."""
        counted = verify(self.folder / "ledger.jsonl")
        return {
            "issued": counted.issued,
            "consumed": counted.consumed,
            "dropped": dict(counted.dropped),
        }

    def trained_rows(self) -> list[tuple[int, int]]:
        """(epoch, row) of every group that was trained on, in the order of groups."""
        records = [record for _, record in ledger.timeline(self.folder / "ledger.jsonl")]
        places = {r["group_id"]: (r["epoch"], r["row"]) for r in records if r["kind"] == "issued"}
        consumed = [number for r in records if r["kind"] == "consumed" for number in r["group_ids"]]
        assert len(set(consumed)) == len(consumed)
        return [places[number] for number in sorted(consumed)]


def same_run(one: Left, other: Left) -> None:
    """Two runs ended with the same bits, and tell the same story."""
    assert one.checkpoint.step == other.checkpoint.step
    ours = one.tensors()
    theirs = other.tensors()
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    assert not different, different
    assert one.run["nodes"] == other.run["nodes"]
    assert one.values() == other.values()
    assert one.trained_rows() == other.trained_rows()
    assert one.group_counts() == other.group_counts()
    ours = one.metrics()
    theirs = other.metrics()
    assert ours.keys() == theirs.keys()
    different = {
        (where, k)
        for where in ours
        for k in {*ours[where], *theirs[where]}
        if ours[where].get(k) != theirs[where].get(k)
    }
    assert not different, different
