"""Signals: the first is told from another thread, whatever lock the main thread holds."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from distflow.runtime.metric_stop import MetricStop
from distflow.runtime.stop_signals import SIGNALS, Interrupted, StopRequest, interruptible

# Has a terminal of its own. SIGHUP is blocked until the terminal is gone and output to it has
# failed.
WRITES_BEFORE_THE_SIGNAL = """
import os, signal, sys, time
from distflow.observe.sanitized_output import sanitized_output
from distflow.observe.writing.terminal_lines import TerminalLines
from distflow.runtime.stop_signals import StopRequest, exit_status
os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it the terminal of the session
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
with sanitized_output(), StopRequest(lambda name: print("stopping", flush=True)) as stop:
    view = TerminalLines(9)
    view.note("info", "ready")
    while os.isatty(0):
        time.sleep(0.01)
    for step in (1, 2, 3):
        view.log(step, {"reward/mean_score": 0.5})
        view.note("warning", "written too late")
        print("printed too late", flush=True)
        print("so is this", file=sys.stderr)
    assert not stop.wanted
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    view.note("info", "saved")
    view.close()
sys.exit(exit_status(stop.signal))
"""


@pytest.fixture(autouse=True)
def hang_ups_arrive() -> Iterator[None]:
    """Also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_kept_and_told(number: signal.Signals) -> None:
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


def test_without_a_signal_nothing_is_told() -> None:
    told: list[str] = []
    with StopRequest(told.append) as stop:
        pass
    assert not told and not stop.wanted


@pytest.mark.parametrize("number", SIGNALS)
def test_where_nothing_is_to_be_saved_a_signal_closes_what_is_open(number: signal.Signals) -> None:
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
def test_a_hang_up_insists_on_nothing(first: signal.Signals) -> None:
    """Closing a terminal sends two."""
    with StopRequest(lambda name: None) as stop:
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.signal == first
    with StopRequest(lambda name: None) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGHUP


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(lambda name: None) as stop, interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wanted
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_sets_no_handler() -> None:
    ran = []

    def work() -> None:
        with interruptible(), StopRequest(lambda name: None):
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran


def test_output_that_fails_before_the_hang_up_arrives_leaves_its_status() -> None:
    """The kernel may fail the writes to a closed terminal before its signal is delivered."""
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    run = subprocess.Popen(
        [sys.executable, "-c", WRITES_BEFORE_THE_SIGNAL], **streams, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    while b"ready" not in shown:
        shown += os.read(ours, 65536)
    os.close(ours)
    assert run.wait(60) == 129


@pytest.mark.parametrize(
    ("metric", "step"),
    [
        ("rewrd/mean_score", 1),
        ("critic/vf_loss", 1),
        ("reward/errors", 5),
        ("val_correct/al/mean", 3),
    ],
)
def test_a_condition_on_a_metric_that_is_missing_is_told_as_soon_as_it_could_be_there(
    metric: str, step: int
) -> None:
    told: list[str] = []
    stop = MetricStop(f"{metric} >= 0.9", told.append)
    steps = []
    for number in range(1, 5):
        validation = {"val_correct/all/mean": 0.5} if number == 3 else {}
        assert not stop.reason(
            number, {"reward/mean_score": 1.0, **validation}, was_validated=bool(validation)
        )
        steps.append(len(told))
    assert steps == [int(number >= step) for number in range(1, 5)]
    near = {
        "rewrd/mean_score": "reward/mean_score",
        "val_correct/al/mean": "val_correct/all/mean",
    }.get(metric, "")
    assert all("no metric of that name so far" in each and near in each for each in told)


def test_a_process_that_is_forked_inside_delays_no_end_and_has_no_handler_of_ours() -> None:
    with StopRequest(lambda name: None) as stop:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        os.kill(process.pid or 0, signal.SIGINT)  # Ctrl-C, which is for the run
    time.sleep(0.2)
    assert process.is_alive() and not stop.wanted
    process.terminate()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
