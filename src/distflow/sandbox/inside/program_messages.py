"""Messages between a program's process and the caller, and their encoding of plain values.

A message has a token of 8 bytes, which the answer repeats from the question, 4 bytes of length, and
JSON in ASCII. The JSON preserves exact types: an array is a list, an object is the name of a type
with the parts of a value: `{"tuple": [1]}`, `{"dict": ["a", 1]}`. The sender may be a malicious
program. The caller caps the size; decoding here caps the depth and the number of keys with the same
hash (many of them would take minutes to build a dictionary from).
"""

import json
import math
import os
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
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


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    int: lambda value: [hex(value)],
    float: lambda value: [repr(value)],
    complex: lambda value: [value.real, value.imag],
    bytes: lambda value: [value.hex()],
    bytearray: lambda value: [value.hex()],
    tuple: iter,
    set: iter,
    frozenset: iter,
    deque: iter,
    dict: lambda value: chain.from_iterable(dict.items(value)),
    range: lambda value: [value.start, value.stop, value.step],
    type({}.keys()): iter,
    type({}.values()): iter,
    type({}.items()): chain.from_iterable,
    Values: lambda value: value.items,
}
"""The parts of a value, which `_MADE` takes by the name of its type."""
_PLAIN_OF: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    list: list,
}
"""The value of a class that inherits from one of these; what a class says of itself is no
matter."""


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
        if kind is int and -_SMALL_INT < value < _SMALL_INT:
            return value
        if kind is float and math.isfinite(value):
            return value
        if kind is list:
            return self._each(value, depth)
        if kind in _PARTS:
            return {kind.__name__: self._each(_PARTS[kind](value), depth)}
        if isinstance(value, Iterator):
            return self.tagged(Values(list(islice(value, MAX_YIELDED + 1))), depth)

        for base, plain in _PLAIN_OF.items():
            if base in kind.__mro__:
                return self.tagged(plain(value), depth)

        for base, parts in _PARTS.items():
            if base in kind.__mro__:
                return {base.__name__: self._each(parts(value), depth)}

        raise NotPlain(f"a value of type {kind.__name__}")

    def _each(self, values: Iterable[Any], depth: int) -> list[JSON]:
        return [self.tagged(value, depth + 1) for value in values]


def _untagged(value: JSON, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_untagged(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value

    ((name, parts),) = value.items()
    if name not in _MADE or not isinstance(parts, list):
        raise ValueError("an unknown type, or one without its parts")
    return _MADE[name]([_untagged(part, depth + 1) for part in parts])


def _hashable(keys: list[Any]) -> list[Any]:
    if len(keys) > MAX_SAME_HASH and max(Counter(map(hash, keys)).values()) > MAX_SAME_HASH:
        raise ValueError(f"more than {MAX_SAME_HASH} keys with one hash")
    return keys


def _make_int(parts: list[Any]) -> int:
    (text,) = parts
    return int(text, 16)


def _make_dict(parts: list[Any]) -> dict[Any, Any]:
    return dict(zip(_hashable(parts[::2]), parts[1::2], strict=True))


def _make_range(parts: list[Any]) -> range:
    made = range(*parts)
    if len(made) > MAX_ITEMS:
        raise ValueError(f"a range of more than {MAX_ITEMS:,} items")
    return made


def _refuse(name: str) -> float:
    raise ValueError(f"{name} without its type")


_ENCODER = json.JSONEncoder(allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse)
_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "int": _make_int,
    "float": lambda parts: float(*parts),
    "complex": lambda parts: complex(*parts),
    "bytes": lambda parts: bytes.fromhex(*parts),
    "bytearray": lambda parts: bytearray.fromhex(*parts),
    "tuple": tuple,
    "set": lambda parts: set(_hashable(parts)),
    "frozenset": lambda parts: frozenset(_hashable(parts)),
    "deque": deque,
    "dict": _make_dict,
    "range": _make_range,
    "dict_keys": lambda parts: dict.fromkeys(_hashable(parts)).keys(),
    "dict_values": lambda parts: dict(enumerate(parts)).values(),
    "dict_items": lambda parts: _make_dict(parts).items(),
    "Values": Values,
}
"""Makes a value of its parts, by the name of its type. Raises ValueError, TypeError and
OverflowError."""
