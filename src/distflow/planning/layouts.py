"""The layout of a model over ranks, and the process groups of the ranks. Plain frozen data that
needs no device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Axis = Literal["data", "tensor", "shard", "replica"]
"""How ranks of a model differ. data: in their samples. tensor: in their part of each layer. Along
data, ranks of a `shard` share one copy of the weights, and those of a `replica` hold the same
part."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis."""

    data: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor


@dataclass(frozen=True)
class Layout:
    """The layout of one role's model. Ranks that differ only along tensor are neighbours."""

    role: str
    engine: str
    ranks: Ranks
    """All that hold a part of it, ascending; as many as `sizes` requires."""
    sizes: Sizes
    shard: int | None = None
    """Number of neighbours along data that share one copy of the weights; others hold replicas.
    None for all."""

    def data_place(self, rank: int) -> int:
        """Where one of its ranks is along data."""
        return self.ranks.index(rank) // self.sizes.tensor

    def tensor_place(self, rank: int) -> int:
        """Where one of its ranks is along tensor."""
        return self.ranks.index(rank) % self.sizes.tensor

    def line(self, axis: Axis, rank: int) -> Ranks:
        """The ranks that differ from one of its ranks only along that axis, including itself,
        ascending."""
        place = self.data_place(rank)
        tensor = self.sizes.tensor
        if axis == "tensor":
            return self.ranks[place * tensor : (place + 1) * tensor]

        along_data = self.ranks[self.tensor_place(rank) :: tensor]
        size = self.shard or self.sizes.data
        if axis == "shard":
            first = place // size * size
            return along_data[first : first + size]
        if axis == "replica":
            return along_data[place % size :: size]

        return along_data


Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that communicate."""

    name: str
    ranks: Ranks


def process_groups(layouts: Sequence[Layout]) -> tuple[ProcessGroup, ...]:
    """Every group of at least two ranks: `process_group_1`, ... in the order in which each rank
    must create them."""
    found: set[Ranks] = set()
    for layout in layouts:
        axes: tuple[Axis, ...] = ("data", "tensor")
        if layout.shard:
            axes = ("data", "tensor", "shard", "replica")
        found.add(layout.ranks)
        for axis in axes:
            found.update(layout.line(axis, rank) for rank in layout.ranks)

    groups = sorted(ranks for ranks in found if len(ranks) > 1)
    return tuple(
        ProcessGroup(f"process_group_{number}", ranks)
        for number, ranks in enumerate(groups, start=1)
    )


def choose_backends(device: str, num_ranks: int, threshold: int) -> tuple[Backend, ...]:
    """The backends, that for tensors first; from `threshold` ranks on, gloo is added to nccl for
    objects."""
    if not device.startswith("cuda"):
        return ("gloo",)
    if num_ranks >= threshold:
        return ("nccl", "gloo")
    return ("nccl",)
