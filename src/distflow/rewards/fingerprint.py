"""What tells one reward function from another: for files what they hold, for functions their code and its constants."""

import functools
import hashlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType

from distflow.config.functions import split_name
from distflow.rewards.given import SUFFIX, read_fingerprint

_LENGTH = 12
_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def fingerprint_target(target: str) -> str:
    """Of the file behind a reward's "module:function" or "file:function"; empty where there is none to read."""
    path = split_name(target)[0]
    if path.endswith(SUFFIX):
        return read_fingerprint(Path(path))
    try:
        found = None if path.endswith(".py") else importlib.util.find_spec(path)
        return _digest(Path(str(found.origin) if found else path).read_bytes())
    except (OSError, ImportError, ValueError):  # a module that is not there is told where it is loaded
        return ""


def fingerprint_function(function: Callable[..., object]) -> str:
    """The same for the same code and constants, in whatever cell or line it stands; with the helpers of its own module,
    without what it imports."""
    return _digest("\n".join(_described(function, set())).encode("utf-8", "surrogatepass"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LENGTH]


def _described(value: object, seen: set[int]) -> Iterator[str]:
    """Lines that say what the value is; an object that says nothing stable of itself is only its type."""
    yield type(value).__name__
    if isinstance(value, _PLAIN):
        yield repr(value)
    if isinstance(value, FunctionType | type | list | dict):  # which may hold themselves
        if id(value) in seen:
            return
        seen.add(id(value))
    for part in _parts(value):
        yield from _described(part, seen)


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, frozenset | set):
        yield from sorted(map(repr, value))
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, vars(value.__self__) if hasattr(value.__self__, "__dict__") else None)
    elif isinstance(value, CodeType):
        yield from (value.co_code, value.co_names, value.co_varnames, value.co_consts)
    elif isinstance(value, FunctionType):
        found = inspect.getclosurevars(value)
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        for name, held in sorted({**found.nonlocals, **found.globals}.items()):
            yield name
            if getattr(held, "__module__", value.__module__) == value.__module__:
                yield held
    elif isinstance(value, type):
        yield from (item for name, item in sorted(vars(value).items()) if isinstance(item, FunctionType | _PLAIN))
    elif isinstance(value, re.Pattern):
        yield value.pattern
    elif hasattr(value, "__wrapped__"):
        yield value.__wrapped__
    elif hasattr(type(value), "__call__") and hasattr(value, "__dict__"):  # noqa: B004  its own class's, if any
        yield from (type(value), vars(value))
