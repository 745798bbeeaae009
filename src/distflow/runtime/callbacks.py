"""A user's callbacks, which can neither end a run nor change its random generators."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

from distflow.data import global_random_states
from distflow.errors import UserError
from distflow.import_target import LoadError, is_async, users_code


@dataclass(frozen=True)
class Callbacks:
    """A user's callbacks, called on the training thread, which waits for them. Raises UserError for
    one that cannot be called so."""

    on_step: Callable[[int, dict[str, float]], object] | None = None
    """Called with the step, counted from 1, and its metrics by flat names."""
    on_validation: Callable[[int, dict[str, float]], object] | None = None
    """The same; step 0 is before training."""
    on_save: Callable[[int, Path], object] | None = None
    """Called with the step and the folder of its checkpoint."""

    def __post_init__(self) -> None:
        for field in fields(self):
            function = getattr(self, field.name)
            second = "metrics"
            if field.name == "on_save":
                second = "checkpoint"

            if function is not None and not _takes_two(function):
                raise UserError(
                    f"{field.name} must be a synchronous function that is called with (step, "
                    f"{second})"
                )


class Caller:
    """Calls callbacks; an error in one becomes a warning, and the run continues. timed: entered
    around each call."""

    def __init__(
        self,
        callbacks: Callbacks,
        warn: Callable[[str], None],
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._callbacks = callbacks
        self._warn = warn
        self._timed = timed

    def call(self, name: str, step: int, result: dict[str, float] | Path) -> None:
        """name: of one of the `Callbacks`, possibly unset. result: metrics or a checkpoint's
        folder."""
        function = getattr(self._callbacks, name)
        if function is None:
            return

        own = getattr(function, "__name__", type(function).__name__)
        try:
            with users_code(f"{name}: {own} raised"), self._timed(), global_random_states.lent():
                function(step, result)
        except LoadError as error:
            self._warn(f"{error}; the run continues")


def _takes_two(function: object) -> bool:
    if not callable(function) or is_async(function):
        return False

    try:
        inspect.signature(function).bind(0, {})
    except TypeError:
        return False
    except ValueError:  # a C function may have no signature
        return True

    return True
