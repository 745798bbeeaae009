"""The collective of one rank: sums and maxima over a group of one are the value itself."""

from typing import Any


class OneRank:
    """Satisfies `Collective` in a run of one process."""

    def sum(self, value: Any) -> Any:
        return value

    def max(self, value: Any) -> Any:
        return value
