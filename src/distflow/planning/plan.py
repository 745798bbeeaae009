"""The plan of a run: which rank runs which nodes, joined by which channels. Frozen data, made without any device."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from distflow.graph import Program

ChannelKind = Literal["local", "stream", "exchange"]


@dataclass(frozen=True)
class Channel:
    """How one node's output reaches another: by reference on one worker (`local`), over the experience edge
    (`stream`), or re-partitioned over ranks (`exchange`)."""

    source: str
    target: str
    kind: ChannelKind


@dataclass(frozen=True)
class RankPlan:
    """What one worker runs, in order."""

    rank: int
    device: str
    experience: tuple[str, ...]
    learning: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Placement of a program."""

    program: str
    ranks: tuple[RankPlan, ...]
    channels: tuple[Channel, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_local(program: Program, device: str) -> Plan:
    """Everything on one worker; the experience edge is where the planes meet."""
    experience = tuple(node.node_id for node in program.experience)
    rank = RankPlan(0, device, experience, tuple(node.node_id for node in program.learning))
    return Plan(program.graph_id, (rank,), tuple(_channels(program, experience)))


def _channels(program: Program, experience: Sequence[str]) -> list[Channel]:
    found = []
    for node in program.nodes:
        for dep in node.deps:
            crosses = dep in experience and node.plane == "learning"
            found.append(Channel(dep, node.node_id, "stream" if crosses else "local"))
    return found
