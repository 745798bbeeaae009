"""Parameters of which a few run, and the others only with the slow tests, or by hand."""

from collections.abc import Iterable

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
