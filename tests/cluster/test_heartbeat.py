"""Who counts as silent: a process that does not answer in time."""

from concurrent.futures import Future
from types import SimpleNamespace

from distflow.cluster import remote_calls
from distflow.cluster.heartbeat import Heartbeat


class Late:
    """An actor that answers once, and no more. alive: as of the actors of a run."""

    def __init__(self) -> None:
        first: Future[object] = Future()
        first.set_result(None)
        self._replies = iter((first, Future[object]()))
        self.alive = SimpleNamespace(remote=lambda: next(self._replies))


def test_a_process_that_answers_no_more_is_silent_and_one_that_starts_is_not(monkeypatch):
    starting = Late()
    next(starting._replies)
    heartbeat = Heartbeat({0: starting, 1: Late()})
    assert [heartbeat.silent() for _ in range(3)] == [None] * 3, "it has a minute"
    monkeypatch.setattr(remote_calls, "REPLIES_WITHIN_S", 0.0)
    assert heartbeat.silent() == 1
