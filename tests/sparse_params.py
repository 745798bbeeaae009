"""Parameters of which a few run, and the others only with the slow tests, or by hand."""

from collections.abc import Callable, Iterable

import pytest

BY_HAND = pytest.mark.by_hand


def one_fast_in(
    number: int,
    values: Iterable[object],
    unpack: bool = False,
    others: pytest.MarkDecorator = pytest.mark.slow,
) -> list[object]:
    """All but the first of every `number` values get the mark. unpack: each value is a tuple of
    several parameters."""
    return [
        pytest.param(*(value if unpack else (value,)), marks=[others] if i % number else [])  # type: ignore[misc]
        for i, value in enumerate(values)
    ]


def first_of_each(values: Iterable[str], kind_of: Callable[[str], object]) -> list[object]:
    """The first value always, the first of each other kind with the slow tests, and what repeats a
    kind by hand."""
    kinds = set[object]()
    params = []
    for value in values:
        marks = [pytest.mark.slow] if kinds else []
        marks += [BY_HAND] if kind_of(value) in kinds else []
        params.append(pytest.param(value, marks=marks))
        kinds.add(kind_of(value))

    return params
