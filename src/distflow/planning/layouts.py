"""The layout of a model over ranks, and the process groups of the ranks. Plain frozen data that
needs no device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import Literal

Axis = Literal["data", "context", "tensor", "tokens", "shard", "replica", "expert", "expert_shard"]
"""How ranks of a model differ. data: in their samples. context: in their part of each packed row.
tensor: in their part of each layer. tokens: along data and context. Along tokens, ranks of a
`shard` share one copy of the weights, and those of a `replica` hold the same part. expert: in their
experts; ranks of an `expert_shard` share the same ones."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis."""

    data: int = 1
    tensor: int = 1
    expert: int = 1
    """Among these same ranks."""
    context: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.context * self.tensor

    @property
    def tokens(self) -> int:
        """Ranks that compute different tokens."""
        return self.data * self.context

    def __str__(self) -> str:
        """As in an allocation."""
        text = f"d{self.data}"
        if self.context > 1:
            text += f"c{self.context}"
        if self.tensor > 1:
            text += f"t{self.tensor}"
        if self.expert > 1:
            text += f"e{self.expert}"
        return text


def alternatives(sizes: Sizes) -> list[Sizes]:
    """All sizes of as many devices that are possible, itself included, the nearest first. Rows are
    divided over no more ranks."""

    def distance(other: Sizes) -> tuple[float, int, int]:
        steps = abs(log2(other.tensor / sizes.tensor)) + abs(log2(other.expert / sizes.expert))
        steps += abs(log2(other.context / sizes.context))
        return steps, other.tensor, other.context

    total = sizes.num_devices
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    contexts = [number for number in divisors if sizes.context % number == 0]
    found = []
    for tensor, context, expert in product(divisors, contexts, divisors):
        if total % (tensor * context) == 0 and (expert == 1 or expert % tensor == 0):
            found.append(Sizes(total // (tensor * context), tensor, expert, context))

    return sorted(found, key=distance)


@dataclass(frozen=True)
class Layout:
    """The layout of one role's model. Ranks that differ only along tensor are neighbours; around
    them those that differ along context."""

    role: str
    engine: str
    ranks: Ranks
    """All that hold a part of it, ascending; as many as `sizes` requires."""
    sizes: Sizes
    shard: int | None = None
    """Number of neighbours along tokens that share one copy of the weights; others hold replicas.
    None for all."""

    def data_place(self, rank: int) -> int:
        """Where one of its ranks is along data."""
        return self.ranks.index(rank) // self._same_samples

    def sample_place(self, rank: int) -> int:
        """Where one of its ranks is among those with the same samples."""
        return self.ranks.index(rank) % self._same_samples

    @property
    def _same_samples(self) -> int:
        return self.sizes.context * self.sizes.tensor

    def line(self, axis: Axis, rank: int) -> Ranks:
        """The ranks that differ from one of its ranks only along that axis, including itself,
        ascending."""
        sizes = self.sizes
        shard = self.shard or sizes.tokens
        distances_and_sizes: dict[Axis, tuple[int, int]] = {
            "tensor": (1, sizes.tensor),
            "context": (sizes.tensor, sizes.context),
            "data": (self._same_samples, sizes.data),
            "tokens": (sizes.tensor, sizes.tokens),
            "shard": (sizes.tensor, shard),
            "replica": (sizes.tensor * shard, sizes.tokens // shard),
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
        axes: list[Axis] = ["data", "context", "tensor", "tokens"]
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
