"""Reward functions given from Python: written into the run's folder, for verifiers are processes of their own.

A function of an importable module is written as its name; one of a notebook, a script or another function with its code
and with what it refers to there. Such a file is a program like a `.py` file: read only where a config names it.
"""

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from distflow.config.errors import UserError
from distflow.config.functions import LoadError
from distflow.observe.files import write_atomically

SUFFIX = ".pkl"
_HEAD = b"distflow reward "


def write_function(function: Callable[..., object], fingerprint: str, file: Path) -> None:
    """A line with the fingerprint, then the pickle. Raises UserError naming what it holds that no other process can
    have, e.g. a lock or an open connection."""
    try:
        data = _pickled(function)
    except Exception as error:  # the edge: whatever an object of the user's raises when it is pickled
        raise UserError(
            f"the reward {name_of(function)} runs in a process of its own, and what it refers to cannot be sent there: "
            f"{_culprit(function) or error}. Make it inside the function, once, in a function of its own under "
            "@functools.cache; or put the reward into a .py file and set custom_reward_function.path"
        ) from error
    write_atomically(file, _HEAD + fingerprint.encode() + b"\n" + data)


def read_function(file: Path) -> Callable[..., object]:
    """Raises LoadError where it cannot be read here: a module that it needs is missing, say."""
    try:
        return cast(Callable[..., object], pickle.loads(file.read_bytes().partition(b"\n")[2]))
    except Exception as error:  # the edge of a user's code
        raise LoadError(
            f"'{file}' cannot be read ({type(error).__name__}: {error}): give the function again"
        ) from error


def read_fingerprint(file: Path) -> str:
    """Without running anything. Raises OSError."""
    return file.read_bytes().partition(b"\n")[0].removeprefix(_HEAD).decode(errors="replace")


def name_of(function: Callable[..., object]) -> str:
    """Its own, that of what it wraps, or its class's."""
    plain = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = plain.func
    return str(getattr(plain, "__name__", type(plain).__name__))


def _pickled(value: object) -> bytes:
    from cloudpickle import CloudPickler

    class Pickler(CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _cached(function: Callable[..., object], parameters: dict[str, Any]) -> Callable[..., object]:
    return functools.lru_cache(**parameters)(function)


def _culprit(function: Callable[..., object]) -> str:
    """The variable of the function that cannot be written, where it is one that it names itself."""
    for name, value in _variables(inspect.unwrap(function)):
        try:
            _pickled(value)
        except Exception as error:  # as above
            return f"its variable '{name}' ({type(error).__name__}: {error})"
    return ""


def _variables(function: Callable[..., object]) -> Iterator[tuple[str, object]]:
    if isinstance(function, FunctionType):
        found = inspect.getclosurevars(function)
        yield from {**found.nonlocals, **found.globals}.items()
