"""Plain values there and back with their types, and what a program that lies may write in their
place."""

import math
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.sandbox.inside.program_messages import (
    MAX_BYTES,
    MAX_DEPTH,
    NotPlain,
    from_text,
    to_text,
)

HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=6,
)
PLAIN = st.recursive(
    HASHABLE
    | st.complex_numbers(allow_nan=False)
    | st.binary().map(bytearray)
    | st.sets(HASHABLE, max_size=4),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(HASHABLE, inner, max_size=4),
    max_leaves=12,
)


def typed(value: object) -> object:
    """Shows types, and the sign of zero, which `==` does not."""
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(typed(item)) for item in value)
    return type(value), hex(value) if type(value) is int else repr(value)


@settings(max_examples=60, deadline=None)
@given(PLAIN)
def test_there_and_back(value):
    assert typed(from_text(to_text(value))) == typed(value)


def test_what_hypothesis_seldom_makes():
    numbers = (-0.0, math.inf, -math.inf, 2**53, -(2**53), 10**5000, True, 1, 1.0)
    for value in ("\ud800 alone", "\0", {1: 2, "1": 3}, *numbers):
        assert typed(from_text(to_text(value))) == typed(value)
    assert math.isnan(from_text(to_text(math.nan)))


def test_containers_of_the_standard_library():
    point = namedtuple("point", "x y")
    assert typed(from_text(to_text(point(1, 2)))) == typed((1, 2))
    for value in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, a=2, b=1)):
        assert typed(from_text(to_text(value))) == typed({"a": 2, "b": 1})


class Liar(int):
    __class__ = int  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Text(str):
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Number(IntEnum):
    ONE = 1


class Color(str, Enum):  # noqa: UP042  its str() is not its value
    RED = "red"


class Point(namedtuple("base", "x y")):
    def size(self) -> int:
        return int(self.x + self.y)


@pytest.mark.parametrize(
    "value",
    [
        *(deque(), deque([(1, True)]), range(3), range(5, -5, -2), range(0)),
        *(
            {1: 2, "a": [3]}.keys(),
            {1: [2]}.values(),
            {1: [2], (3,): {}}.items(),
            OrderedDict(a=1).keys(),
        ),
    ],
)
def test_sequences_and_views(value):
    read = from_text(to_text(value))
    assert typed(list(read)) == typed(list(value))
    if isinstance(value, deque | range):
        assert type(read) is type(value)
    else:
        assert type(read) in (type({}.keys()), type({}.values()), type({}.items()))


@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"range": [0, 1000000, 1]}',
            '{"range": [0, 9999999999999999999999, 1]}',
            '{"range": [0, 3, 0]}',
        ),
        *(
            '{"range": ["0", 3, 1]}',
            '{"range": []}',
            '{"dict_keys": [[1]]}',
            '{"dict_keys": 3}',
            '{"deque": 3}',
        ),
        *(
            '{"dict_items": [1]}',
            '{"dict_items": [1, 2, 3]}',
            '{"dict_items": [[1], 2]}',
            '{"dict_values": {}}',
        ),
    ],
)
def test_what_is_no_sequence_or_view_is_refused(text):
    with pytest.raises(ValueError):
        from_text(text)


@pytest.mark.parametrize(
    "value",
    [
        *(object(), int, len, ..., memoryview(b"")),
        *({"x": object()}, iter([object()])),
    ],
)
def test_other_types_are_refused(value):
    with pytest.raises(NotPlain):
        to_text(value)


def test_a_class_that_inherits_from_a_plain_one_is_that_value():
    for value, plain in (
        (Liar(1), 1),
        (Text("x"), "x"),
        (Table(a=1), {"a": 1}),
        (Number.ONE, 1),
        (Color.RED, "red"),
    ):
        assert typed(from_text(to_text(value))) == typed(plain)

    assert typed(from_text(to_text({"x": Point(1, 2)}))) == typed({"x": (1, 2)})


def test_an_iterator_is_what_it_yields():
    read = from_text(to_text(n * n for n in range(3)))
    again = from_text(to_text(read))
    assert read != [0, 1, 4] and list(read) == list(again) == [0, 1, 4] and list(read) == []
    endless = from_text(to_text(count(5)))
    assert next(endless) == 5 and list(islice(endless, 3)) == [6, 7, 8]
    with pytest.raises(RuntimeError, match=" 2,000"):
        list(endless)


@pytest.mark.slow
def test_deep_round_and_large():
    deep: list[object] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    round_: list[object] = []
    round_.append(round_)
    shared: list[object] = []
    for _ in range(60):
        shared = [shared, shared]

    for value in (deep, round_, shared):
        with pytest.raises(NotPlain, match="nested"):
            to_text(value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "NaN",
            "Infinity",
            "[1,]",
            "{}",
            '{"int": [5]}',
            '{"int": ["x"]}',
            '{"no": [1]}',
            '{"int": ["1"], "set": []}',
        ),
        *(
            '{"tuple": 5}',
            '{"set": [[]]}',
            '{"dict": [1]}',
            '{"dict": [[], 1]}',
            '{"dict": {"a": 1}}',
        ),
        *(
            '{"complex": ["x"]}',
            '{"complex": 1}',
            '{"complex": [1, null]}',
            '{"bytes": ["0"]}',
            '{"bytes": [1]}',
        ),
        *(
            '{"float": 1.0}',
            '{"float": ["x"]}',
            '{"frozenset": {}}',
            "[" * 100_000,
            "9" * 5000,
            "\xff\xfe",
        ),
    ],
)
def test_nonsense_is_a_value_error(text):
    with pytest.raises(ValueError):
        from_text(text)
    with pytest.raises(ValueError):
        from_text(text.encode("latin-1"))


def test_depth_is_capped_when_read():
    with pytest.raises(ValueError, match="nested"):
        from_text("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_keys_that_collide_cost_no_time(kind):
    """Multiples of 2⁶¹ - 1 all have the hash 0: 50,000 in one dictionary take half a minute."""
    keys = [f'{{"int": ["{hex(number * (2**61 - 1))}"]}}' for number in range(50_000)]
    if kind == "dict":
        keys = [f"{key}, 0" for key in keys]
    started = time.process_time()
    with pytest.raises(ValueError, match="one hash"):
        from_text(f'{{"{kind}": [{", ".join(keys)}]}}')
    assert time.process_time() - started < 5


@pytest.mark.slow
def test_the_largest_frame_is_read_in_bounded_time():
    started = time.process_time()
    assert len(from_text("[" + ",".join(["[]"] * (MAX_BYTES // 3)) + "]")) == MAX_BYTES // 3
    assert time.process_time() - started < 10
