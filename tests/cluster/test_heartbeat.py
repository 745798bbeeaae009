"""Who counts as silent: a process that is stopped, after seconds, and not one that is late."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from distflow.cluster.heartbeat import Heartbeat, process_here


class Late:
    """An actor that said which process it is, and answers no more. alive: as of the actors of a
    run."""

    def __init__(self, said: object) -> None:
        first: Future[object] = Future()
        first.set_result(said)
        self._replies = iter((first, *(Future[object]() for _ in range(2))))
        self.alive = SimpleNamespace(remote=lambda: next(self._replies))


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_a_process_that_is_stopped_is_silent_and_one_that_is_late_is_not(
    sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.cluster.heartbeat.STOPPED_S", 0.0)
    machine = process_here()[0]
    late, elsewhere, unknown = (
        Late(said) for said in ((machine, sleeper), ("another machine", sleeper), None)
    )
    heartbeat = Heartbeat({0: late, 1: elsewhere, 2: unknown})
    assert [heartbeat.silent() for _ in range(3)] == [None] * 3, "it has a minute"
    os.kill(sleeper, signal.SIGSTOP)
    while state_of(sleeper) != "T":
        pass
    assert [heartbeat.silent() for _ in range(2)] == [None, 0], (
        "one of another machine is not, nor one unknown"
    )
    os.kill(sleeper, signal.SIGCONT)
    while state_of(sleeper) == "T":
        pass
    assert heartbeat.silent() is None, "it runs again"
