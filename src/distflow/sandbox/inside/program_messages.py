"""Messages between a program's process and the caller, and their encoding of plain values.

A message has a token of 8 bytes, which the answer repeats from the question, 4 bytes of length, and
JSON in ASCII. The JSON preserves exact types: an array is a list, an object is a tag with its
content: `{"tuple": [1]}`, `{"dict": [["a", 1]]}`. The sender may be a malicious program. The caller
caps the size; decoding here caps the depth and the number of keys with the same hash (many of them
would take minutes to build a dictionary from).
"""

import json
import math
import os
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

HEADER = struct.Struct(">8sI")
MAX_BYTES = 2 * 2**20


def write_frame(descriptor: int, token: bytes, body: bytes) -> None:
    """Write a frame; blocks until everything is written. Raises OSError."""
    rest = memoryview(HEADER.pack(token, len(body)) + body)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_frame(descriptor: int) -> tuple[bytes, bytes] | None:
    """Token and body; None at the end of the stream."""
    header = _read_exactly(descriptor, HEADER.size)
    if header is None:
        return None
    token, size = HEADER.unpack(header)
    body = _read_exactly(descriptor, size)
    return None if body is None else (token, body)


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    read = bytearray()
    while len(read) < size:
        part = os.read(descriptor, size - len(read))
        if not part:
            return None
        read += part
    return bytes(read)


JSON: TypeAlias = "None | bool | int | float | str | list[JSON] | dict[str, JSON]"

MAX_DEPTH = 100
MAX_ITEMS = 500_000
MAX_SAME_HASH = 64
_SMALL_INT = 2**53
MAX_YIELDED = 2000
_PLAIN = (int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, deque)
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}


class Values:
    """An iterator over what one of the program's yielded, at most the first `MAX_YIELDED`; it
    equals nothing else."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self._next = 0

    def __repr__(self) -> str:
        return f"an iterator over {self.items!r}"

    def __iter__(self) -> "Values":
        return self

    def __next__(self) -> Any:
        self._next += 1
        if self._next > MAX_YIELDED:
            raise RuntimeError(f"only the first {MAX_YIELDED:,} values of an iterator are read")
        if self._next > len(self.items):
            raise StopIteration
        return self.items[self._next - 1]


class NotPlain(ValueError):
    """A value that has another type, is nested too deeply or is too large."""


def to_text(value: object) -> str:
    """JSON in ASCII. Plain values are None, bool, int, float, complex, str, bytes, bytearray, list,
    tuple, set, frozenset, dict, deque, range, a view of a dict and `Values`. One of a class that
    inherits from them, like a named tuple, `Counter` or an IntEnum, becomes the plain value; an
    iterator becomes the `Values` that it yields. Raises NotPlain."""
    return _ENCODER.encode(_Writer().tagged(value, 0))


def from_text(text: str | bytes) -> Any:
    """Decode a value. Raises ValueError for anything that `to_text` does not write."""
    try:
        return _untagged(
            _DECODER.decode(text if isinstance(text, str) else text.decode("ascii")), 0
        )
    except (RecursionError, TypeError, OverflowError) as error:
        raise ValueError(f"no plain value: {error}") from None


class _Writer:
    def __init__(self) -> None:
        self.num_items = 0

    def tagged(self, value: Any, depth: int) -> JSON:
        self.num_items += 1
        if depth > MAX_DEPTH or self.num_items > MAX_ITEMS:
            raise NotPlain(
                f"a value nested deeper than {MAX_DEPTH} or of more than {MAX_ITEMS:,} items"
            )
        kind = type(value)  # an object's `__class__` may be forged
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SMALL_INT < value < _SMALL_INT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return self._each(value, depth)
        if kind in (tuple, set, frozenset, deque):
            return {kind.__name__: self._each(value, depth)}
        if kind is range:
            return {"range": self._each((value.start, value.stop, value.step), depth)}
        if kind is dict:
            return {"dict": [self._each(pair, depth) for pair in dict.items(value)]}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind is complex:
            return {"complex": [repr(value.real), repr(value.imag)]}
        if kind is Values:
            return {"iterator": self._each(value.items, depth)}
        if isinstance(value, Iterator):
            return {"iterator": self._each(islice(value, MAX_YIELDED + 1), depth)}
        view = next((name for each, name in _VIEWS.items() if each in kind.__mro__), None)
        if view is not None:
            return {view: self._each(value, depth)}
        base: Any = next((each for each in _PLAIN if each in kind.__mro__), None)
        if base is None:
            raise NotPlain(f"a value of type {kind.__name__}")
        # an enum's `str()` is not its text
        own = {dict: dict.items, str: str.__str__}.get(base, lambda each: each)
        return self.tagged(base(own(value)), depth)

    def _each(self, values: Iterable[Any], depth: int) -> list[JSON]:
        return [self.tagged(value, depth + 1) for value in values]


def _untagged(value: JSON, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_untagged(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag not in _READ:
        raise ValueError("an unknown tag")
    return _READ[tag](content, depth)


def _read_each(content: Any, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("a tag without its items")
    return [_untagged(item, depth + 1) for item in content]


def _hashable(keys: list[Any]) -> list[Any]:
    if len(keys) > MAX_SAME_HASH and max(Counter(map(hash, keys)).values()) > MAX_SAME_HASH:
        raise ValueError(f"more than {MAX_SAME_HASH} keys with one hash")
    return keys


def _read_dict(content: Any, depth: int) -> dict[Any, Any]:
    return _dict_of([_read_each(pair, depth) for pair in content])


def _dict_of(pairs: list[Any]) -> dict[Any, Any]:
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("no pair of key and value")
    _hashable([key for key, _ in pairs])
    return dict(pairs)


def _read_range(content: Any, depth: int) -> range:
    read = range(*_read_each(content, depth))
    if len(read) > MAX_ITEMS:
        raise ValueError(f"a range of more than {MAX_ITEMS:,} items")
    return read


def _read_text(content: Any) -> str:
    if not isinstance(content, str):
        raise ValueError("a tag without its text")
    return content


def _read_complex(content: Any, depth: int) -> complex:
    real, imag = content
    return complex(float(_read_text(real)), float(_read_text(imag)))


def _refuse(name: str) -> float:
    raise ValueError(f"{name} without its tag")


_ENCODER = json.JSONEncoder(allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse)
_READ: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda content, _: int(_read_text(content), 16),
    "float": lambda content, _: float(_read_text(content)),
    "complex": _read_complex,
    "bytes": lambda content, _: bytes.fromhex(_read_text(content)),
    "bytearray": lambda content, _: bytearray.fromhex(_read_text(content)),
    "tuple": lambda content, depth: tuple(_read_each(content, depth)),
    "set": lambda content, depth: set(_hashable(_read_each(content, depth))),
    "frozenset": lambda content, depth: frozenset(_hashable(_read_each(content, depth))),
    "dict": _read_dict,
    "deque": lambda content, depth: deque(_read_each(content, depth)),
    "range": _read_range,
    "keys": lambda content, depth: dict.fromkeys(_hashable(_read_each(content, depth))).keys(),
    "values": lambda content, depth: dict(enumerate(_read_each(content, depth))).values(),
    "items": lambda content, depth: _dict_of(_read_each(content, depth)).items(),
    "iterator": lambda content, depth: Values(_read_each(content, depth)),
}
