"""Ends a run before its last step by signals: Ctrl-C, SIGTERM, the terminal's hang-up.

The first finishes the step, saves and exits; the second exits at once. In both cases the exit
status is 128 + the signal's number.

A hang-up never counts as the second: closing a terminal causes two, from the shell and from the
system, and systemd sends one after its SIGTERM.
"""

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, NoReturn

from distflow.processes.descendants import end_descendants

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED: Final = 0


class Interrupted(KeyboardInterrupt):
    """A signal came while there was nothing to save. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_status(number: int) -> int:
    """The exit status of a process that a signal ended, as in shells."""
    return 128 + number


def ended_by(number: int) -> str:
    return f"distflow: ended by {signal.Signals(number).name}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first signal raises `Interrupted` in the main thread, so that resources are
    closed, and the second ends the process. During imports the first one does too: libraries catch
    what is raised there, and continue or fail with another error."""
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if came and number == signal.SIGHUP:
            return

        if came:
            _leave_by(number)
        came.append(number)

        if _is_importing(frame):
            with suppress(OSError):
                os.write(2, f"{ended_by(number)}\n".encode())
            _leave_by(number)

        raise Interrupted(number)

    with _handled(interrupt):
        yield


class Stop:
    """Checked between two steps. wanted: whether the run is to end, on all of its ranks."""

    wanted = False


class StopRequest(Stop):
    """Inside, the first signal is stored in `signal`, and the second ends the process. It works
    only on the main thread, which alone may handle signals.

    ends_process: if False, the second signal raises KeyboardInterrupt, and the process continues.
    on_first: called with the signal's name, on another thread: a handler interrupts the main thread
    anywhere, even while that holds the lock needed to write a message.
    """

    def __init__(self, on_first: Callable[[str], None], ends_process: bool = True) -> None:
        self.signal: int | None = None
        self._insisted = False
        self._on_first = on_first
        self._ends_process = ends_process
        self._handlers = _handled(self._asked)

    def __enter__(self) -> "StopRequest":
        # from handler to thread without a lock, which the main thread may hold
        self._read, self._write = os.pipe()
        self._teller = threading.Thread(target=self._tell, name="signals", daemon=True)
        self._teller.start()
        self._handlers.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._handlers.__exit__(None, None, None)
        # a process that the user's code forked may have the pipe open as well
        os.write(self._write, bytes([_ENDED]))
        self._teller.join()
        os.close(self._write)
        os.close(self._read)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            if self._insisted and not self._ends_process:
                raise KeyboardInterrupt
            if self._insisted:
                _leave_by(number)
            self._insisted = True

        if self.signal is None:
            self.signal = number
            self.wanted = True
            os.write(self._write, bytes([number]))

    def _tell(self) -> None:
        while number := os.read(self._read, 1)[0]:
            self._on_first(signal.Signals(number).name)


def leave_at_once(status: int) -> NoReturn:
    """Exit without locks or waiting; the processes that this one started die with it."""
    end_descendants()
    os._exit(status)


def _leave_by(number: int) -> NoReturn:
    """The same for a signal's handler: the signals that come meanwhile are ignored, since each
    would start from the beginning."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    leave_at_once(exit_status(number))


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` is called for signals. An ignored hang-up stays ignored, as `nohup`
    requests. Only the main thread may set handlers: in others nothing changes."""

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_dead_terminals()
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = [number for number in SIGNALS if number != signal.SIGHUP or not ignored]
    previous = {number: signal.signal(number, handle) for number in wanted}
    _handled_now.append(wanted)

    try:
        yield
    finally:
        if _handled_now:  # not in a forked process
            _handled_now.pop()
            for number, before in previous.items():
                signal.signal(number, before)


_handled_now: list[list[signal.Signals]] = []
"""The signals of each `_handled` that this process is in."""


def _handle_no_more() -> None:
    """In a process that the user's code forked: Ctrl-C, which reaches all processes of the
    terminal, is for the run, which ends this one; other signals are for it."""
    for number in set().union(*_handled_now):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    _handled_now.clear()


os.register_at_fork(after_in_child=_handle_no_more)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _leave_dead_terminals() -> None:
    """Redirect output from a closed terminal, where it would raise and end the run before it has
    saved."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
