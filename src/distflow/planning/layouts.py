"""The layout of a model over ranks, and the process groups of the ranks. Plain frozen data that
needs no device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Literal

Axis = Literal["data", "tensor", "shard", "replica", "expert", "expert_shard"]
"""How ranks of a model differ. data: in their samples. tensor: in their part of each layer. Along
data, ranks of a `shard` share one copy of the weights, and those of a `replica` hold the same
part. expert: in their experts; ranks of an `expert_shard` share the same ones."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis."""

    data: int = 1
    tensor: int = 1
    expert: int = 1
    """Among these same ranks."""

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        """As in an allocation."""
        text = f"d{self.data}"
        if self.tensor > 1:
            text += f"t{self.tensor}"
        if self.expert > 1:
            text += f"e{self.expert}"
        return text


def alternatives(sizes: Sizes) -> list[Sizes]:
    """All sizes of as many devices that are possible, itself included, the nearest first."""

    def distance(other: Sizes) -> tuple[float, int]:
        steps = abs(log2(other.tensor / sizes.tensor)) + abs(log2(other.expert / sizes.expert))
        return steps, other.tensor

    total = sizes.num_devices
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    found = []
    for tensor in divisors:
        for expert in divisors:
            if expert == 1 or expert % tensor == 0:
                found.append(Sizes(total // tensor, tensor, expert))

    return sorted(found, key=distance)


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
        sizes = self.sizes
        shard = self.shard or sizes.data
        distances_and_sizes: dict[Axis, tuple[int, int]] = {
            "tensor": (1, sizes.tensor),
            "data": (sizes.tensor, sizes.data),
            "shard": (sizes.tensor, shard),
            "replica": (sizes.tensor * shard, sizes.data // shard),
            "expert": (1, sizes.expert),
            "expert_shard": (sizes.expert, sizes.tensor * shard // sizes.expert),
        }
        distance, size = distances_and_sizes[axis]
        place = self.ranks.index(rank)
        first = place - place // distance % size * distance
        return self.ranks[first : first + size * distance : distance]


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
        axes: list[Axis] = ["data", "tensor"]
        if layout.shard:
            axes += ["shard", "replica"]
        if layout.sizes.expert > 1:
            axes += ["expert", "expert_shard"]
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
