"""Where a model lies: the ranks of a role in a mesh of sizes, and which rank has which coordinate."""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

Axis = Literal["data", "tensor", "pipeline", "context", "expert"]
AXES: tuple[Axis, ...] = ("data", "tensor", "pipeline", "context", "expert")
Part = Literal["shard", "replica"]
"""Of the ranks along data."""

# Outermost first: ranks that differ in the last axis only are neighbours.
_TRAINING: tuple[Axis, ...] = ("pipeline", "data", "context", "tensor")
_INFERENCE: tuple[Axis, ...] = ("data", "pipeline", "context", "tensor")


@dataclass(frozen=True)
class Sizes:
    """Over how many ranks each axis goes. expert: of the ranks along data × context, those that share the experts."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Layout:
    """The model of one role. ranks: all that hold a piece of it, ascending; as many as `sizes` asks for.

    shard: how many neighbours along data share one copy of the weights, where the others hold replicas; None is all.
    """

    role: str
    engine: str
    ranks: tuple[int, ...]
    sizes: Sizes
    shard: int | None = None

    def rank_at(self, dp: int, tp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """The rank at these coordinates. Order of ranks: pp → dp → cp → tp for training, dp → pp → cp → tp for
        inference, the last one fastest."""
        at: dict[Axis, int] = {"data": dp, "tensor": tp, "pipeline": pp, "context": cp}
        index = 0
        for axis, size in self._mesh().items():
            assert 0 <= at[axis] < size, f"{axis} has {size} coordinates, no {at[axis]}"
            index = index * size + at[axis]
        return self.ranks[index]

    def place(self, rank: int) -> dict[Axis, int]:
        """The coordinates of one of its ranks."""
        mesh = self._mesh()
        return dict(zip(mesh, list(product(*map(range, mesh.values())))[self.ranks.index(rank)], strict=True))

    def line(self, axis: Axis | Part, rank: int) -> tuple[int, ...]:
        """The ranks that differ from one of its ranks along that axis alone, itself among them, ascending."""
        return next(line for line in self.groups(axis) if rank in line)

    def head(self, dp: int) -> int:
        """The rank that speaks for a data-parallel coordinate: the first of its last pipeline stage."""
        return self.rank_at(dp, pp=self.sizes.pipeline - 1)

    def heads(self) -> tuple[int, ...]:
        """The head of each data-parallel coordinate, in their order."""
        return tuple(self.head(dp) for dp in range(self.sizes.data))

    def groups(self, axis: Axis | Part) -> list[tuple[int, ...]]:
        """The ranks that differ along that axis alone, one tuple for each coordinate of the others, each ascending.

        Experts are shared by `sizes.expert` neighbours among the ranks that differ along data and context. Of the ranks
        along data `shard` are neighbours that share one copy of the weights, `replica` those that have the same part.
        """
        if axis == "expert":
            return _neighbours(self._lines(("data", "context")), self.sizes.expert)
        if axis == "shard" or axis == "replica":
            lines, size = self._lines(("data",)), self.shard or self.sizes.data
            if axis == "shard":
                return _neighbours(lines, size)
            return [line[place::size] for line in lines for place in range(size)]
        return self._lines((axis,))

    def _lines(self, along: tuple[Axis, ...]) -> list[tuple[int, ...]]:
        lines: dict[tuple[int, ...], list[int]] = {}
        mesh = self._mesh()
        for rank, at in zip(self.ranks, product(*map(range, mesh.values())), strict=True):
            others = tuple(place for axis, place in zip(mesh, at, strict=True) if axis not in along)
            lines.setdefault(others, []).append(rank)
        return [tuple(line) for line in lines.values()]

    def _mesh(self) -> dict[Axis, int]:
        axes = _INFERENCE if self.role == "rollout" else _TRAINING
        mesh = {axis: int(getattr(self.sizes, axis)) for axis in axes}
        assert prod(mesh.values()) == len(self.ranks), f"{self.role} has {len(self.ranks)} ranks for {self.sizes}"
        return mesh


def _neighbours(lines: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    return [line[start : start + size] for line in lines for start in range(0, len(line), size)]
