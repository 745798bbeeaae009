"""Fingerprints of reward functions: of a file its content, of a function its code and constants."""

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType

from distflow.graph.fields import innermost
from distflow.import_target import split_name
from distflow.rewards.functions import SUFFIX, read_fingerprint

_LENGTH = 12
_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def fingerprint_target(target: str) -> str:
    """Fingerprint of the file of a "module:function" or "file:function"; empty if it cannot be read."""
    path = split_name(target)[0]
    files = [Path(path)] if path.endswith((".py", SUFFIX)) else _files_of(path)
    read = read_fingerprint if path.endswith(SUFFIX) else _digest_of
    try:
        return next((read(file) for file in files if file.is_file()), "")
    except OSError:  # reported when it is loaded
        return ""


def _files_of(module: str) -> list[Path]:
    """Where a module may lie, found without importing the packages above it."""
    stem = module.replace(".", "/")
    return [Path(folder, name) for folder in sys.path for name in (f"{stem}.py", f"{stem}/__init__.py")]


def fingerprint_function(function: Callable[..., object]) -> str:
    """Independent of the cell or line that the code is in; includes helpers of the same module, but not imports."""
    return _digest("\n".join(_Lines(str(innermost(function).__module__)).of(function)).encode("utf-8", "surrogatepass"))


def _digest_of(file: Path) -> str:
    return _digest(file.read_bytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LENGTH]


class _Lines:
    """Lines that describe a value. module: functions and classes of other modules are described by name only."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._seen: set[int] = set()

    def of(self, value: object) -> Iterator[str]:
        yield type(value).__name__
        if isinstance(value, _PLAIN):
            yield repr(value)
        elif isinstance(value, FunctionType | type) and value.__module__ != self._module:
            yield f"{value.__module__}.{value.__qualname__}"
        elif id(value) not in self._seen:
            if isinstance(value, FunctionType | type | list | dict):  # which may hold themselves
                self._seen.add(id(value))
            for part in self._parts(value):
                yield from self.of(part)

    def _parts(self, value: object) -> Iterator[object]:
        """The parts of a value; none for an object without a stable description."""
        if isinstance(value, tuple | list):
            yield from value
        elif isinstance(value, frozenset | set):
            yield from sorted(map(repr, value))
        elif isinstance(value, dict):
            yield from value.items()
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, functools._lru_cache_wrapper):
            yield value.__wrapped__
        elif isinstance(value, re.Pattern):
            yield value.pattern
        elif isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, CodeType):
            yield from (value.co_code, value.co_names, value.co_varnames, value.co_consts)
        elif isinstance(value, FunctionType):
            found = inspect.getclosurevars(value)
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
            yield from sorted({**found.nonlocals, **found.globals}.items())
        elif isinstance(value, type):
            for name, item in sorted(vars(value).items()):
                if isinstance(item, FunctionType) or (isinstance(item, _PLAIN) and not name.startswith("__")):
                    yield item
        elif type(value).__module__ == self._module:
            yield from (type(value), getattr(value, "__dict__", None))
