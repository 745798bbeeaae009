"""The layout of a model over ranks, as a mesh with an axis for each kind of parallelism, and the
process groups of the ranks. Plain frozen data that needs no device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

Axis = Literal["data", "tensor", "pipeline", "context", "expert"]
AXES: tuple[Axis, ...] = ("data", "tensor", "pipeline", "context", "expert")
Part = Literal["shard", "replica"]
"""Axes within the ranks along data."""

# Outermost first: ranks that differ only in the last axis are neighbours.
_TRAINING: tuple[Axis, ...] = ("pipeline", "data", "context", "tensor")
_INFERENCE: tuple[Axis, ...] = ("data", "pipeline", "context", "tensor")

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """How many ranks along data × context share the experts."""

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Layout:
    """The layout of one role's model."""

    role: str
    engine: str
    ranks: Ranks
    """All that hold a part of it, ascending; as many as `sizes` requires."""
    sizes: Sizes
    shard: int | None = None
    """Number of neighbours along data that share one copy of the weights; others hold replicas.
    None for all."""

    def place(self, rank: int) -> dict[Axis, int]:
        """The coordinates of one of its ranks. Order of ranks: pipeline → data → context → tensor
        for training, data → pipeline → context → tensor for inference, the last one fastest."""
        return self._places()[rank]

    def line(self, axis: Axis | Part, rank: int) -> Ranks:
        """The ranks that differ from one of its ranks only along that axis, including itself,
        ascending."""
        return _line_of(self, axis)[rank]

    def groups(self, axis: Axis | Part) -> list[Ranks]:
        """The ranks that differ only along that axis, one tuple for each coordinate of the others,
        each ascending.

        Experts are shared by `sizes.expert` neighbours among the ranks that differ along data and
        context. Along data, `shard` groups neighbours that share one copy of the weights, `replica`
        ranks that have the same part.
        """
        size = self.shard or self.sizes.data
        if axis == "expert":
            return _neighbours(self._lines("data", "context"), self.sizes.expert)
        if axis == "shard":
            return _neighbours(self._lines("data"), size)
        if axis == "replica":
            found: list[Ranks] = []
            for line in self._lines("data"):
                for place in range(size):
                    found.append(line[place::size])
            return found
        return self._lines(axis)

    def _lines(self, *along: Axis) -> list[Ranks]:
        lines: dict[Ranks, list[int]] = {}
        for rank, place in self._places().items():
            others = tuple(index for axis, index in place.items() if axis not in along)
            lines.setdefault(others, []).append(rank)
        return [tuple(line) for line in lines.values()]

    def _places(self) -> dict[int, dict[Axis, int]]:
        """The coordinates of each rank."""
        assert self.sizes.num_devices == len(self.ranks), (
            f"{self.role} has {len(self.ranks)} ranks for {self.sizes}"
        )
        axes = _INFERENCE if self.role == "rollout" else _TRAINING
        ranges = [range(getattr(self.sizes, axis)) for axis in axes]
        found = {}
        for rank, place in zip(self.ranks, product(*ranges), strict=True):
            found[rank] = dict(zip(axes, place, strict=True))
        return found


@lru_cache(maxsize=64)
def _line_of(layout: Layout, axis: Axis | Part) -> dict[int, Ranks]:
    """By rank; every rank of a large cluster asks for its own."""
    found: dict[int, Ranks] = {}
    for line in layout.groups(axis):
        for rank in line:
            found[rank] = line
    return found


def _neighbours(lines: list[Ranks], size: int) -> list[Ranks]:
    found: list[Ranks] = []
    for line in lines:
        for start in range(0, len(line), size):
            found.append(line[start : start + size])
    return found


Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that communicate."""

    name: str
    ranks: Ranks
    uses: tuple[tuple[str, str], ...]
    """Each (role, axis) that they form; the axis `all` is the role's whole mesh."""


def process_groups(layouts: Sequence[Layout]) -> tuple[ProcessGroup, ...]:
    """Every group of at least two ranks, once for all its uses: `process_group_1`, ... in the order
    in which each rank must create them."""
    uses: dict[Ranks, list[tuple[str, str]]] = {}
    for layout in layouts:
        axes: tuple[Axis | Part, ...] = (*AXES, "replica", "shard") if layout.shard else AXES
        lines = [("all", layout.ranks)]
        for axis in axes:
            for line in layout.groups(axis):
                lines.append((axis, line))
        for name, ranks in lines:
            if len(ranks) > 1:
                uses.setdefault(tuple(sorted(ranks)), []).append((layout.role, name))
    return tuple(
        ProcessGroup(f"process_group_{number}", ranks, tuple(used))
        for number, (ranks, used) in enumerate(sorted(uses.items()), start=1)
    )


def choose_backends(device: str, num_ranks: int, threshold: int) -> tuple[Backend, ...]:
    """The backends, that for tensors first; from `threshold` ranks on, gloo is added to nccl for
    objects."""
    if not device.startswith("cuda"):
        return ("gloo",)
    return ("nccl", "gloo") if num_ranks >= threshold else ("nccl",)
