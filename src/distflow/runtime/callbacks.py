"""Functions of the user's that hear of a run while it runs. They cannot end it, nor move its random generators."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

from distflow.config.errors import UserError
from distflow.config.places import users_place
from distflow.data import generators
from distflow.graph.functions import is_async


@dataclass(frozen=True)
class Callbacks:
    """Each is called on the thread that trains, which waits for it.

    on_step, on_validation: with the step, counted from 1 (0: before training), and its metrics by their flat names.
    on_save: with the step and the folder of its checkpoint.
    Raises UserError for one that cannot be called so.
    """

    on_step: Callable[[int, dict[str, float]], object] | None = None
    on_validation: Callable[[int, dict[str, float]], object] | None = None
    on_save: Callable[[int, Path], object] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            function, given = getattr(self, field.name), "checkpoint" if field.name == "on_save" else "metrics"
            if function is not None and not _takes_two(function):
                raise UserError(f"{field.name} must be a plain function that is called with (step, {given})")


class Caller:
    """Calls them; what one raises is told with its name, and the run goes on. warn: told so. timed: entered around each
    call."""

    def __init__(
        self,
        callbacks: Callbacks,
        warn: Callable[[str], None],
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._callbacks, self._warn, self._timed = callbacks, warn, timed

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_step", self._callbacks.on_step, step, dict(metrics))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_validation", self._callbacks.on_validation, step, dict(metrics))

    def save(self, step: int, path: Path) -> None:
        self._call("on_save", self._callbacks.on_save, step, path)

    def _call(self, name: str, function: Callable[..., object] | None, *arguments: object) -> None:
        if function is None:
            return
        try:
            with self._timed(), generators.lent(generators.states()):
                function(*arguments)
        except Exception as error:  # the edge of a user's code
            place = f" (at {found})" if (found := users_place(error)) else ""
            own = getattr(function, "__name__", type(function).__name__)
            self._warn(f"{name}: {own} raised {type(error).__name__}: {error}{place}; the run goes on")


def _takes_two(function: object) -> bool:
    if not callable(function) or is_async(function):
        return False
    try:
        inspect.signature(function).bind(0, {})
    except TypeError:
        return False
    except ValueError:  # a function of C says nothing of its parameters
        return True
    return True
