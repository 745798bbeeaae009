"""Sums and maxima over the ranks of a group."""

from typing import Any, Protocol


class Collective(Protocol):
    """Sums and maxima over the ranks of a group; the identity on one rank."""

    def sum(self, value: Any) -> Any: ...

    def max(self, value: Any) -> Any: ...


class OneRank:
    """The collective of one rank: sums and maxima over a group of one are the value itself."""

    def sum(self, value: Any) -> Any:
        return value

    def max(self, value: Any) -> Any:
        return value
