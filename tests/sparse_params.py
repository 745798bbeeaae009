"""Parameters of which a few run with the default tests, and the others with the slow ones."""

from collections.abc import Iterable

import pytest


def one_fast_in(number: int, values: Iterable[object], unpack: bool = False) -> list[object]:
    """The first of every `number` values is fast. unpack: each value is a tuple of several parameters."""
    return [
        pytest.param(*(value if unpack else (value,)), marks=[pytest.mark.slow] if i % number else [])  # type: ignore[misc]
        for i, value in enumerate(values)
    ]
