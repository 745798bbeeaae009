"""The process groups of a plan: which ranks speak to each other, in one order on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distflow.planning.layout import AXES, Axis, Layout, Part

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that speak to each other. uses: each (role, axis) that they are a line of; the axis `all` is its mesh."""

    name: str
    ranks: tuple[int, ...]
    uses: tuple[tuple[str, str], ...]


def process_groups(layouts: Sequence[Layout]) -> tuple[ProcessGroup, ...]:
    """Every group of two ranks or more, once, whatever uses it: `process_group_1`, ... by their ranks, which is the
    order in which each rank must create them."""
    uses: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for layout in layouts:
        axes: tuple[Axis | Part, ...] = (*AXES, "replica", "shard") if layout.shard else AXES
        lines = [("all", layout.ranks), *((axis, line) for axis in axes for line in layout.groups(axis))]
        for axis, ranks in lines:
            if len(ranks) > 1:
                uses.setdefault(tuple(sorted(ranks)), []).append((layout.role, axis))
    return tuple(
        ProcessGroup(f"process_group_{number}", ranks, tuple(used))
        for number, (ranks, used) in enumerate(sorted(uses.items()), start=1)
    )


def choose_backends(device: str, num_ranks: int, threshold: int) -> tuple[Backend, ...]:
    """What carries tensors, first; from `threshold` ranks on gloo stands beside nccl and carries objects."""
    if not device.startswith("cuda"):
        return ("gloo",)
    return ("nccl", "gloo") if num_ranks >= threshold else ("nccl",)
