"""The plan of a pipeline over many devices: by the allocation where there is one, else by the scheduler.

On machines of equally many devices `place` then decides on which ranks each part lies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.config import Config
from distflow.config.derived_settings import offload_keys
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.planning.allocation_expression import KEY, Allocation, check_agreement, parse_allocation
from distflow.planning.layout import Layout, Sizes
from distflow.planning.part_assignment import apportion, pipeline_parts
from distflow.planning.plan import Plan, choose_backends, make_channels, process_groups, rank_plan

_SIT_WITH_ACTOR = ("critic", "ref", "reward_model")
"""Roles that need no part of their own in an allocation."""


@dataclass(frozen=True)
class Cluster:
    """Machines and their devices; rank r is on machine r // devices_per_node."""

    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node


@dataclass(frozen=True)
class DpGroup:
    """Ranks that run the same nodes. roles: engine and sizes of each role whose model they hold."""

    num_devices: int
    nodes: frozenset[str]
    roles: Mapping[str, tuple[str, Sizes]]


def plan_ray(pipeline: BoundPipeline, config: Config, device: str, sizes: Mapping[str, str | float]) -> Plan:
    """One rank a device: `trainer.nnodes` machines with `trainer.n_gpus_per_node` each.

    device: of each worker, as it sees it. sizes: parameters of the model of each role, for the scheduler.
    Raises UserError where the allocation cannot be read, contradicts another key or does not fit the pipeline, and
    where devices are too few.
    """
    cluster = Cluster(config.trainer.nnodes, config.trainer.n_gpus_per_node)
    if config.trainer.allocation:
        allocation = parse_allocation(config.trainer.allocation)
        check_agreement(allocation, config)
        dp_groups = _allocated(pipeline, allocation)
    else:
        dp_groups = _scheduled(pipeline, config, cluster, sizes)
    _check_engines_lie_together(pipeline, dp_groups)
    return _placed(pipeline, config, device, cluster, dp_groups)


def _allocated(pipeline: BoundPipeline, allocation: Allocation) -> list[DpGroup]:
    for part in allocation.parts:
        if part.role not in pipeline.engines:
            has = ", ".join(sorted(pipeline.engines)) or "none"
            allocation.refuse(part.at, f"pipeline '{pipeline.graph_id}' has no {part.role}; its engines: {has}")
    _refuse_unlike(allocation)
    groups = [{part.role: (part.engine, part.sizes) for part in group} for group in allocation.groups]
    main = next((roles for roles in groups if "actor" in roles), groups[0])
    for role in sorted(pipeline.engines):
        if allocation.find(role) is None:
            if role not in _SIT_WITH_ACTOR or "actor" not in main:
                raise UserError(f"{KEY}='{allocation.text}' names no {role}, which pipeline '{pipeline.graph_id}' has")
            main[role] = main["actor"]
    return [
        DpGroup(group[0].sizes.num_devices, _nodes_of(pipeline, roles, is_main=roles is main), roles)
        for group, roles in zip(allocation.groups, groups, strict=True)
    ]


def _refuse_unlike(allocation: Allocation) -> None:
    """Roles that train on the same devices share every step in the same way."""
    for group in allocation.groups:
        first, *others = [part for part in group if part.role != "rollout"] or [group[0]]
        for part in others:
            if part.sizes != first.sizes:
                allocation.refuse(
                    part.at, f"'{part.role}' needs the sizes of '{first.role}', with which it shares devices and steps"
                )


def _scheduled(
    pipeline: BoundPipeline, config: Config, cluster: Cluster, sizes: Mapping[str, str | float]
) -> list[DpGroup]:
    """Independent parts get devices of their own; a single part is on all of them."""
    parts = pipeline_parts(pipeline, sizes)
    if len(parts) == 1:
        shares = [cluster.num_devices]
    else:
        shares = apportion([part.size for part in parts], cluster.num_devices, config.dag.apportion_strategy)
    return [
        DpGroup(share, frozenset(part.nodes), {role: _model(role, config, share) for role in part.engines})
        for part, share in zip(parts, shares, strict=True)
    ]


def _model(role: str, config: Config, num_devices: int) -> tuple[str, Sizes]:
    if role != "rollout":
        return config.actor_rollout_ref.actor.strategy, Sizes(data=num_devices)
    rollout = config.actor_rollout_ref.rollout
    tensor = rollout.tensor_model_parallel_size
    if num_devices % tensor:
        raise UserError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor} does not divide the {num_devices} devices"
        )
    return rollout.name, Sizes(data=num_devices // tensor, tensor=tensor)


def _nodes_of(pipeline: BoundPipeline, roles: Mapping[str, object], is_main: bool) -> frozenset[str]:
    """The nodes of a dp group: those that use its engines, and those without engines that they wait for.

    The rollout loop is whole where the rollout engine is, or where training is if nothing generates. Nodes without an
    engine, for which no node with one waits, belong to the main dp group.
    """
    rollout_nodes = {node.node_id for node in pipeline.rollout_nodes}
    makes_groups = "rollout" in roles or "rollout" not in pipeline.engines
    wanted = {node.node_id for node in pipeline.training_nodes if set(node.engines) & set(roles)}
    if is_main:
        wanted |= _idle_ends(pipeline)
    for node in reversed(pipeline.training_nodes):
        if node.node_id in wanted:
            wanted |= {dep for dep in node.deps if not pipeline.node(dep).engines} - rollout_nodes
    return frozenset(wanted | (rollout_nodes if makes_groups else set()))


def _idle_ends(pipeline: BoundPipeline) -> set[str]:
    """Nodes of the training loop without an engine, for which no node with one waits."""
    needed: set[str] = set()
    for node in reversed(pipeline.training_nodes):
        if node.engines or node.node_id in needed:
            needed.update(node.deps)
    return {node.node_id for node in pipeline.training_nodes if not node.engines} - needed


def _check_engines_lie_together(pipeline: BoundPipeline, dp_groups: Sequence[DpGroup]) -> None:
    """Raises UserError for a node with engines on different devices, and for a rollout on devices that train another
    model than the policy: its new weights cannot get there while these train."""
    training_nodes = {node.node_id for node in pipeline.training_nodes}
    for dp_group in dp_groups:
        if (
            "rollout" in dp_group.roles
            and dp_group.nodes & training_nodes
            and "actor" in pipeline.engines - set(dp_group.roles)
        ):
            beside = ", ".join(f"'{role}'" for role in dp_group.roles if role != "rollout")
            raise UserError(
                f"{KEY}: the rollout is on the devices of {beside} and not on those of 'actor': join it with 'actor' "
                "by '|', or give it devices of its own by '+'"
            )
    for node in pipeline.nodes:
        for dp_group in dp_groups:
            apart = [engine for engine in node.engines if engine not in dp_group.roles]
            if node.node_id in dp_group.nodes and apart:
                here = next((f"'{engine}'" for engine in dp_group.roles if engine in node.engines), None)
                raise UserError(
                    f"{KEY}: node '{node.node_id}' uses '{apart[0]}', which is not on the devices of "
                    f"{here or 'the engines of its plane'}: join them with '|'"
                )


def _placed(
    pipeline: BoundPipeline, config: Config, device: str, cluster: Cluster, dp_groups: Sequence[DpGroup]
) -> Plan:
    shares = [dp_group.num_devices for dp_group in dp_groups]
    dag = config.dag
    where = place(shares, cluster, dag.consider_node_cohesion, dag.consider_node_load)
    dp_group_of = {rank: dp_group for dp_group, ranks in zip(dp_groups, where, strict=True) for rank in ranks}
    ranks = tuple(
        rank_plan(
            pipeline,
            rank,
            device,
            [node.node_id for node in pipeline.rollout_nodes if node.node_id in dp_group_of[rank].nodes],
            [node.node_id for node in pipeline.training_nodes if node.node_id in dp_group_of[rank].nodes],
            cluster.node_of(rank),
        )
        for rank in range(cluster.num_devices)
    )
    layouts = tuple(
        Layout(role, engine, own_ranks, sizes, _shard(role, engine, sizes, config))
        for dp_group, own_ranks in zip(dp_groups, where, strict=True)
        for role, (engine, sizes) in dp_group.roles.items()
    )
    return Plan(
        pipeline.graph_id,
        ranks,
        make_channels(pipeline, ranks),
        layouts,
        process_groups(layouts),
        # an offloaded engine may have to send from the host's memory
        choose_backends(device, cluster.num_devices, 1 if offload_keys(config) else dag.backend_threshold),
    )


def _shard(role: str, engine: str, sizes: Sizes, config: Config) -> int | None:
    """How many neighbours along data share one copy of a model's weights; None for all, or where each has it whole."""
    if role == "rollout" or engine != "fsdp":
        return None
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    if size in (-1, sizes.data):
        return None
    if sizes.data % size:
        raise UserError(
            f"actor_rollout_ref.actor.fsdp_config.fsdp_size={size} does not divide the {sizes.data} data parallel "
            f"ranks of the {role}: set it to a divisor, or to -1 for all of them"
        )
    return size


def place(shares: Sequence[int], cluster: Cluster, cohesion: bool = True, load: bool = True) -> list[tuple[int, ...]]:
    """The ranks of each part, ascending. shares: devices of each, all of the cluster's together.

    cohesion: parts that fit on one machine are each put on one, where the rest can follow best (`_cost` looks ahead);
    larger ones, and what fits nowhere whole, then take as few machines as they can. load: of machines that suit a part
    alike, the one with fewer busy devices. At last the lower ranks.
    """
    assert sum(shares) == cluster.num_devices, f"shares {shares} are not the {cluster.num_devices} devices"
    size = cluster.devices_per_node
    free = [list(range(node * size, node * size + size)) for node in range(cluster.num_nodes)]
    ranks: list[list[int]] = [[] for _ in shares]
    order = list(range(len(shares)))
    if cohesion:
        for part in [part for part in order if shares[part] <= size]:
            later = [shares[other] for other in order if other != part]
            node = _best_node(shares[part], [len(ranks_) for ranks_ in free], later, size, load)
            if node is not None:
                order.remove(part)
                ranks[part] = _take(free[node], shares[part])
    for part in order:
        while len(ranks[part]) < shares[part]:
            wanted = shares[part] - len(ranks[part])
            holes = [len(ranks_) for ranks_ in free]
            if cohesion:
                node = _next_node(wanted, holes)
            else:
                node = holes.index(max(holes)) if load else next(node for node, hole in enumerate(holes) if hole)
            ranks[part] += _take(free[node], min(wanted, holes[node]) if cohesion else 1)
    return [tuple(sorted(found)) for found in ranks]


def _best_node(share: int, holes: list[int], later: list[int], size: int, load: bool) -> int | None:
    """The machine on which a part lies whole at the least cost for those that come later; None where none has room."""
    costs = {hole: _cost(later, _less(holes, holes.index(hole), share), size) for hole in set(holes) if hole >= share}
    fits = [node for node, hole in enumerate(holes) if hole in costs]
    return min(fits, key=lambda node: (costs[holes[node]], -holes[node] if load else 0, node), default=None)


def _cost(shares: list[int], holes: list[int], size: int) -> tuple[int, int]:
    """(parts that fit on one machine and lie on several, pieces of parts), as tight packing would end."""
    left = sorted((share for share in shares if share <= size), reverse=True)
    holes = sorted(holes)
    pieces = 0
    for node, hole in enumerate(holes):
        for share in _filling(left, hole):
            left.remove(share)
            holes[node] -= share
            pieces += 1
    for share in [*left, *(share for share in shares if share > size)]:
        while share:
            node = _next_node(share, holes)
            piece = min(share, holes[node])
            share, holes[node], pieces = share - piece, holes[node] - piece, pieces + 1
    return len(left), pieces


def _filling(shares: list[int], hole: int) -> list[int]:
    """Of the shares, descending, those that fill a hole best; of such sets one with the largest shares."""
    best: dict[int, list[int]] = {0: []}  # by their sum
    for share in shares:
        for total, chosen in list(best.items()):
            if total + share <= hole:
                best.setdefault(total + share, [*chosen, share])
    return best[max(best)]


def _next_node(wanted: int, holes: list[int]) -> int:
    """Where the next piece of a part goes: the smallest hole that takes all of it, else the largest."""
    enough = [hole for hole in holes if hole >= wanted]
    return holes.index(min(enough) if enough else max(holes))


def _less(holes: list[int], node: int, share: int) -> list[int]:
    return [hole - share if at == node else hole for at, hole in enumerate(holes)]


def _take(free: list[int], count: int) -> list[int]:
    taken, free[:count] = free[:count], []
    return taken
