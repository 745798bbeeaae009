"""Signals: the first is told from another thread, whatever lock the main thread holds."""

import os
import signal
import threading

import pytest

from distflow.runtime.stop_signals import SIGNALS, Interrupted, StopRequest, interruptible


@pytest.fixture(autouse=True)
def hang_ups_arrive():
    """Also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_kept_and_told(number):
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
            assert stop.wanted and stop.signal == number
        assert done.wait(10)

    assert told == [number.name]
    assert signal.getsignal(number) == before


def test_without_a_signal_nothing_is_told():
    told: list[str] = []
    with StopRequest(told.append) as stop:
        pass
    assert not told and not stop.wanted


@pytest.mark.parametrize("number", SIGNALS)
def test_where_nothing_is_to_be_saved_a_signal_closes_what_is_open(number):
    before = signal.getsignal(number)
    closed = False
    with pytest.raises(Interrupted) as raised, interruptible():
        try:
            os.kill(os.getpid(), number)
        finally:
            closed = True

    assert raised.value.number == number and closed
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("first", SIGNALS)
def test_a_hang_up_insists_on_nothing(first):
    """Closing a terminal sends two."""
    with StopRequest(lambda name: None) as stop:
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.signal == first

    with StopRequest(lambda name: None) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGHUP
