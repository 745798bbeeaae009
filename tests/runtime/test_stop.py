"""Signals: the first is told from another thread, whatever lock the main thread holds."""

import os
import signal
import threading

import pytest

from distflow.runtime.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_wanted_and_is_told(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    told, lock = [], threading.Lock()
    done = threading.Event()

    def on_first(name: str) -> None:
        with lock:
            told.append(name)
        done.set()

    with StopRequest(on_first) as stop:
        assert not stop.wanted
        with lock:  # what a message needs is held just where the signal comes in
            os.kill(os.getpid(), number)
            assert stop.wanted
        assert done.wait(10)
    assert told == [number.name]
    assert signal.getsignal(number) == before


def test_without_a_signal_nothing_is_told() -> None:
    told: list[str] = []
    with StopRequest(told.append) as stop:
        pass
    assert not told and not stop.wanted
