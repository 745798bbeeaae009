"""The layout of a model: the ranks of a role in a mesh of sizes, and the coordinates of each rank."""

from dataclasses import dataclass
from itertools import product
from typing import Literal

Axis = Literal["data", "tensor", "pipeline", "context", "expert"]
AXES: tuple[Axis, ...] = ("data", "tensor", "pipeline", "context", "expert")
Part = Literal["shard", "replica"]
"""Axes within the ranks along data."""

# Outermost first: ranks that differ in the last axis only are neighbours.
_TRAINING: tuple[Axis, ...] = ("pipeline", "data", "context", "tensor")
_INFERENCE: tuple[Axis, ...] = ("data", "pipeline", "context", "tensor")


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis. expert: of the ranks along data × context, those that share the experts."""

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
    """The model of one role. ranks: all that hold a part of it, ascending; as many as `sizes` asks for.

    shard: number of neighbours along data that share one copy of the weights; others hold replicas. None is all.
    """

    role: str
    engine: str
    ranks: tuple[int, ...]
    sizes: Sizes
    shard: int | None = None

    def place(self, rank: int) -> dict[Axis, int]:
        """The coordinates of one of its ranks. Order of ranks: pipeline → data → context → tensor for training, data →
        pipeline → context → tensor for inference, the last one fastest."""
        return self._places()[rank]

    def line(self, axis: Axis | Part, rank: int) -> tuple[int, ...]:
        """The ranks that differ from one of its ranks along that axis alone, itself included, ascending."""
        return next(line for line in self.groups(axis) if rank in line)

    def groups(self, axis: Axis | Part) -> list[tuple[int, ...]]:
        """The ranks that differ along that axis alone, one tuple for each coordinate of the others, each ascending.

        Experts are shared by `sizes.expert` neighbours among the ranks that differ along data and context. Of the ranks
        along data `shard` are neighbours that share one copy of the weights, `replica` those that have the same part.
        """
        size = self.shard or self.sizes.data
        if axis == "expert":
            return _neighbours(self._lines("data", "context"), self.sizes.expert)
        if axis == "shard":
            return _neighbours(self._lines("data"), size)
        if axis == "replica":
            return [line[place::size] for line in self._lines("data") for place in range(size)]
        return self._lines(axis)

    def _lines(self, *along: Axis) -> list[tuple[int, ...]]:
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self._places().items():
            others = tuple(index for axis, index in place.items() if axis not in along)
            lines.setdefault(others, []).append(rank)
        return [tuple(line) for line in lines.values()]

    def _places(self) -> dict[int, dict[Axis, int]]:
        """The coordinates of each rank."""
        assert self.sizes.num_devices == len(self.ranks), f"{self.role} has {len(self.ranks)} ranks for {self.sizes}"
        axes = _INFERENCE if self.role == "rollout" else _TRAINING
        places = product(*(range(getattr(self.sizes, axis)) for axis in axes))
        return {rank: dict(zip(axes, place, strict=True)) for rank, place in zip(self.ranks, places, strict=True)}


def _neighbours(lines: list[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    return [line[start : start + size] for line in lines for start in range(0, len(line), size)]
