"""Forwards what workers report to the driver's terminal and to the user's callbacks: both sides."""

import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray

from distflow.cluster.coordinator_actor import News
from distflow.cluster.failures import reply_of
from distflow.cluster.heartbeat import COORDINATOR
from distflow.cluster.object_store import shortened
from distflow.observe.writing.terminal import TerminalView
from distflow.runtime.rank_info import Place
from distflow.runtime.user_calls.sync_calls import Callbacks, Caller

_MOST_SHOWN = 1000  # characters of a sample
_LOOKS_EVERY_S = 0.5


class Teller:
    """Sends messages to the driver through the coordinator. Its calls run on many threads, so messages are numbered."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator, self._sender, self._lock = coordinator, secrets.token_hex(8), threading.Lock()
        self._num_told, self._under_way = 0, list[Any]()

    def __call__(self, method: str, *arguments: Any) -> None:
        with self._lock:
            self._wait(timeout_s=0.0)
            self._under_way.append(self._coordinator.tell.remote(self._sender, self._num_told, method, *arguments))
            self._num_told += 1

    def end(self) -> None:
        """Wait until all has arrived, or the coordinator's process is gone."""
        with self._lock:
            self._wait()

    def _wait(self, timeout_s: float | None = None) -> None:
        if self._under_way:
            _, self._under_way = ray.wait(self._under_way, num_returns=len(self._under_way), timeout=timeout_s)


class RemoteView:
    """The driver's `TerminalView`. A worker that does not lead shows its notes alone."""

    def __init__(self, tell: Teller, place: Place) -> None:
        self._tell, self._place = tell, place

    def note(self, kind: str, message: str) -> None:
        where = "" if self._place.leads else f"worker {self._place.rank}: "
        self._tell("note", kind, where + shortened(message))

    def sample(self, prompt: str, response: str, score: float | None) -> None:
        self._leader("sample", prompt[:_MOST_SHOWN], response[:_MOST_SHOWN], score)

    def __getattr__(self, name: str) -> Any:
        return partial(self._leader, name)

    def _leader(self, method: str, *arguments: Any) -> None:
        if self._place.leads:
            self._tell(method, *arguments)


def remote_callbacks(tell: Teller) -> Callbacks:
    """Callbacks that call the user's functions in the driver."""

    def on_step(step: int, metrics: dict[str, float]) -> None:
        tell("on_step", step, metrics)

    def on_validation(step: int, metrics: dict[str, float]) -> None:
        tell("on_validation", step, metrics)

    def on_save(step: int, path: Path) -> None:
        tell("on_save", step, path)

    return Callbacks(on_step, on_validation, on_save)


class DriverOutput:
    """Passes what workers report to the driver's terminal and to the user's callbacks."""

    def __init__(self, view: TerminalView, caller: Caller) -> None:
        self._view = view
        self._callers: dict[str, Callable[..., None]] = {
            "on_step": caller.step,
            "on_validation": caller.validation,
            "on_save": caller.save,
        }
        self._asked: Any = None

    def show(self, coordinator: Any, last: bool = False) -> None:
        """Show what has been reported since, or is within a moment. Raises WorkerDied where the coordinator is gone."""
        for method, arguments in self._news(coordinator, last):
            tell: Callable[..., None] = self._callers.get(method) or getattr(self._view, method)
            tell(*arguments)

    def _news(self, coordinator: Any, last: bool) -> list[News]:
        self._asked = self._asked or coordinator.news.remote(0.0 if last else _LOOKS_EVERY_S)
        if not last and not ray.wait([self._asked], timeout=2 * _LOOKS_EVERY_S)[0]:
            return []  # whether it responds at all, its heartbeat reports
        asked, self._asked = self._asked, None
        found: list[News] = reply_of(asked, COORDINATOR)
        return found
