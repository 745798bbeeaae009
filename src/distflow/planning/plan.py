"""The plan of a run: which rank runs which nodes, joined by which channels. Frozen data, made without any device."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from distflow.config.errors import UserError
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
    """What one worker builds and runs: its nodes by plane, in order, and the engines and services that they need."""

    rank: int
    device: str
    experience: tuple[str, ...]
    learning: tuple[str, ...]
    engines: tuple[str, ...]
    services: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Placement of a program."""

    program: str
    ranks: tuple[RankPlan, ...]
    channels: tuple[Channel, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def plan_local(program: Program, device: str) -> Plan:
    """Everything on one worker; the experience edge is where the planes meet."""
    experience = [node.node_id for node in program.experience]
    rank = rank_plan(program, 0, device, experience, [node.node_id for node in program.learning])
    return Plan(program.graph_id, (rank,), tuple(_channels(program, experience)))


def rank_plan(program: Program, rank: int, device: str, experience: Sequence[str], learning: Sequence[str]) -> RankPlan:
    """A worker that runs these nodes, with the engines and services that they name."""
    nodes = [program.node(node_id) for node_id in (*experience, *learning)]
    engines = dict.fromkeys(engine for node in nodes for engine in node.engines)
    services = dict.fromkeys(service for node in nodes for service in node.contract.services)
    return RankPlan(rank, device, tuple(experience), tuple(learning), tuple(engines), tuple(services))


def check_plan(plan: Plan, program: Program) -> None:
    """Raises UserError for a node that the program has not or that no rank runs, for one without its engine, and for an
    engine that no node of its rank uses."""
    for rank in plan.ranks:
        wanted = rank_plan(program, rank.rank, rank.device, rank.experience, rank.learning)
        pairs = (("engine", rank.engines, wanted.engines), ("service", rank.services, wanted.services))
        for what, given, needed in pairs:
            unused = [name for name in given if name not in needed]
            missing = [name for name in needed if name not in given]
            if unused:
                raise UserError(
                    f"the plan gives rank {rank.rank} the {what} '{unused[0]}', which no node of program "
                    f"'{program.graph_id}' uses there: take it out of the plan"
                )
            if missing:
                raise UserError(
                    f"the plan gives rank {rank.rank} no {what} '{missing[0]}', which its nodes need: add it there"
                )
    placed = {node_id for rank in plan.ranks for node_id in (*rank.experience, *rank.learning)}
    idle = [node.node_id for node in program.nodes if node.node_id not in placed]
    if idle:
        raise UserError(f"no rank of the plan runs node '{idle[0]}' of program '{program.graph_id}'")


def _channels(program: Program, experience: Sequence[str]) -> list[Channel]:
    found = []
    for node in program.nodes:
        for dep in node.deps:
            crosses = dep in experience and node.plane == "learning"
            found.append(Channel(dep, node.node_id, "stream" if crosses else "local"))
    return found
