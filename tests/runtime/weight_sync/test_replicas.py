"""Ranks that train together compare the weights that each has."""

import pytest

from distflow.errors import TrustError
from distflow.runtime.weight_sync.receipts import check_replicas
from distflow.training.engine import OneRank


class TwoRanks(OneRank):
    """The other one has these hashes."""

    size = 2

    def __init__(self, other: dict[str, str]) -> None:
        self.others = TwoRanks.digests(other)
        self.other = other

    @staticmethod
    def digests(hashes: dict[str, str]) -> list[float]:
        seen = Recording()
        check_replicas(hashes, 0, seen)
        return seen.seen

    def max(self, value):  # type: ignore[no-untyped-def]
        return max(value, self.others.pop(0))

    def gather(self, value):  # type: ignore[no-untyped-def]
        return [value, self.other]


class Recording(OneRank):
    size = 2

    def __init__(self) -> None:
        self.seen: list[float] = []

    def max(self, value):  # type: ignore[no-untyped-def]
        self.seen.append(value)
        return value


def test_the_same_weights_pass_and_others_are_named() -> None:
    own = {"a": "1", "b": "2", "c": "3"}
    check_replicas(own, 4, TwoRanks(dict(own)))
    with pytest.raises(TrustError, match="after step 4: b, 1 tensors in all"):
        check_replicas(own, 4, TwoRanks({**own, "b": "9"}))
