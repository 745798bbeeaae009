"""Ctrl-C and SIGTERM: once finishes the step, saves and leaves; twice leaves at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

SHOW_CURSOR = b"\x1b[?25h\n"
Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` takes and returns; None is a handler that was not set by Python."""


class StopRequest:
    """While it is entered, the first signal sets `wanted`, and the second ends the process. On another thread than the
    main one, which alone may handle signals, it hears of none.

    ends_process: else the second signal raises KeyboardInterrupt, and the process goes on.
    on_first: told the signal's name, on a thread of its own: a handler interrupts the main thread anywhere, also where
    it holds the lock that writing a message needs.
    """

    def __init__(self, on_first: Callable[[str], None], ends_process: bool = True) -> None:
        self.wanted = False
        self._on_first, self._ends_process = on_first, ends_process
        self._previous: dict[int, Handler] = {}

    def __enter__(self) -> "StopRequest":
        self._read, self._write = os.pipe()  # from handler to thread without a lock, which the main thread may hold
        self._teller = threading.Thread(target=self._tell, name="signals", daemon=True)
        self._teller.start()
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            self._previous[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._teller.join()
        os.close(self._read)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and not self._ends_process:
            raise KeyboardInterrupt
        if self.wanted:
            _leave_at_once(128 + number)
        self.wanted = True
        os.write(self._write, bytes([number]))

    def _tell(self) -> None:
        for number in os.read(self._read, 1):
            self._on_first(signal.Signals(number).name)


def _leave_at_once(status: int) -> None:
    """No lock is taken and nothing is waited for; verifier processes die with this one."""
    if os.isatty(1):
        os.write(1, SHOW_CURSOR)  # the live view had hidden it
    os._exit(status)
