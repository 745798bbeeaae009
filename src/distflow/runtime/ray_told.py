"""What workers tell, on its way to the driver's screen and to the user's functions: their side of it, and its own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from distflow.observe.terminal import TerminalView
from distflow.runtime import ray_pulse
from distflow.runtime.callbacks import Callbacks, Caller
from distflow.runtime.place import Place
from distflow.runtime.ray_blame import WorkerDied
from distflow.runtime.ray_coordinator import News
from distflow.runtime.ray_groups import shortened

_MOST_SHOWN = 1000  # characters of a sample
_LOOKS_EVERY_S = 0.5


class RemoteView:
    """The driver's `TerminalView`, of which a worker that does not lead shows what it notes alone."""

    def __init__(self, tell: Any, place: Place) -> None:
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


def remote_callbacks(tell: Any) -> Callbacks:
    """The user's functions live in the driver."""

    def on_step(step: int, metrics: dict[str, float]) -> None:
        tell("on_step", step, metrics)

    def on_validation(step: int, metrics: dict[str, float]) -> None:
        tell("on_validation", step, metrics)

    def on_save(step: int, path: Path) -> None:
        tell("on_save", step, path)

    return Callbacks(on_step, on_validation, on_save)


class Told:
    """What workers tell, on the driver's screen and to the user's functions."""

    def __init__(self, view: TerminalView, caller: Caller) -> None:
        self._view = view
        self._callers: dict[str, Callable[..., None]] = {
            "on_step": caller.step,
            "on_validation": caller.validation,
            "on_save": caller.save,
        }

    def show(self, coordinator: Any, wait_s: float = _LOOKS_EVERY_S) -> None:
        """What is new; waits for some, but no longer than that. Raises WorkerDied where the coordinator is gone."""
        for method, arguments in self._news(coordinator, wait_s):
            tell: Callable[..., None] = self._callers.get(method) or getattr(self._view, method)
            tell(*arguments)

    def _news(self, coordinator: Any, wait_s: float) -> list[News]:
        try:
            found: list[News] = ray.get(coordinator.news.remote(wait_s), timeout=ray_pulse.ANSWERS_WITHIN_S + wait_s)
        except (RayActorError, GetTimeoutError) as err:
            raise WorkerDied(f"the coordinator's process is gone or does not answer ({type(err).__name__}).") from err
        return found
