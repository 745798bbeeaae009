"""Ctrl-C and SIGTERM: once finishes the step, saves and leaves; twice leaves at once."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """While it is entered, the first signal sets `wanted`, and the second ends the process."""

    def __init__(self, on_first: Callable[[str], None]) -> None:
        self.wanted = False
        self._on_first = on_first
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            os._exit(128 + number)
        self.wanted = True
        self._on_first(signal.Signals(number).name)
