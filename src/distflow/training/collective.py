"""Collective operations over the ranks of a group."""

from typing import Protocol, TypeVar

from torch import Tensor

Named = dict[str, float]

# The result has the argument's type: a tensor, a number, or numbers by name.
Reducible = TypeVar("Reducible", Tensor, float, Named)
Plain = TypeVar("Plain")


class Collective(Protocol):
    """Sums and maxima over the ranks of a group, elementwise, and a gather; the result is the same on every rank.

    All ranks make the same calls in the same order, with tensors of one shape and numbers of the same names. The
    argument is left as it is.
    """

    @property
    def rank(self) -> int:
        """This process's place in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def sum(self, value: Reducible) -> Reducible: ...

    def max(self, value: Reducible) -> Reducible: ...

    def gather(self, value: Plain) -> list[Plain]:
        """The values of all ranks, in order: plain data and small tensors."""
        ...


class OneRank:
    """The collective of one rank: sums and maxima over a group of one are the value itself."""

    rank = 0
    size = 1

    def sum(self, value: Reducible) -> Reducible:
        return value

    def max(self, value: Reducible) -> Reducible:
        return value

    def gather(self, value: Plain) -> list[Plain]:
        return [value]
