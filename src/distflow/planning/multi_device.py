"""The plan of a pipeline over many devices: by the allocation where there is one, else by the scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.config import Config
from distflow.config.derived_settings import offload_keys
from distflow.errors import UserError
from distflow.graph import BoundNode, BoundPipeline
from distflow.planning.allocation_expression import KEY, Allocation, check_agreement, parse_allocation
from distflow.planning.layout import Layout, Sizes
from distflow.planning.part_assignment import apportion, pipeline_parts
from distflow.planning.plan import Plan, choose_backends, make_channels, process_groups, rank_plan
from distflow.planning.rank_placement import Cluster, place

_SIT_WITH_ACTOR = ("critic", "ref", "reward_model")
"""Roles that need no part of their own in an allocation."""


@dataclass(frozen=True)
class DpGroup:
    """Ranks that run the same nodes. roles: engine and sizes of each role whose model they hold."""

    num_devices: int
    nodes: frozenset[str]
    roles: Mapping[str, tuple[str, Sizes]]


def plan_ray(pipeline: BoundPipeline, config: Config, device: str, sizes: Mapping[str, str | float]) -> Plan:
    """One rank a device: `trainer.nnodes` machines with `trainer.n_gpus_per_node` each.

    device: what each worker computes on, as it sees it. sizes: parameters of the model of each role, for the scheduler.
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
    _check_teams(pipeline, dp_groups)
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
    """What trains on the same devices shares every step in the same way."""
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
    """Parts that are independent get devices of their own; what is one part is on all of them."""
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
    """The nodes of a team: those that use its engines, and those without engines that they wait for.

    The plane that makes prompt groups is whole where the rollout is, or where learning is if nothing generates. What
    uses no engine and nothing with one waits for is the main team's.
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
    """Learning nodes without an engine that nothing with one waits for."""
    needed: set[str] = set()
    for node in reversed(pipeline.training_nodes):
        if node.engines or node.node_id in needed:
            needed.update(node.deps)
    return {node.node_id for node in pipeline.training_nodes if not node.engines} - needed


def _check_teams(pipeline: BoundPipeline, dp_groups: Sequence[DpGroup]) -> None:
    """Raises UserError for a node whose engines lie on different devices, and for a rollout on devices that train
    something else than the policy, whose new weights have no way there while these train."""
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
                raise UserError(_apart(node, apart[0], [engine for engine in dp_group.roles if engine in node.engines]))


def _apart(node: BoundNode, engine: str, here: Sequence[str]) -> str:
    beside = f"'{here[0]}'" if here else "the engines of its plane"
    return f"{KEY}: node '{node.node_id}' uses '{engine}', which is not on the devices of {beside}: join them with '|'"


def _placed(
    pipeline: BoundPipeline, config: Config, device: str, cluster: Cluster, dp_groups: Sequence[DpGroup]
) -> Plan:
    shares = [dp_group.num_devices for dp_group in dp_groups]
    dag = config.dag
    where = place(shares, cluster, dag.consider_node_cohesion, dag.consider_node_load)
    team_of = {rank: dp_group for dp_group, ranks in zip(dp_groups, where, strict=True) for rank in ranks}
    ranks = tuple(
        rank_plan(
            pipeline,
            rank,
            device,
            [node.node_id for node in pipeline.rollout_nodes if node.node_id in team_of[rank].nodes],
            [node.node_id for node in pipeline.training_nodes if node.node_id in team_of[rank].nodes],
            cluster.node_of(rank),
        )
        for rank in range(cluster.num_devices)
    )
    layouts = tuple(
        Layout(role, engine, held, sizes, _shard(role, engine, sizes, config))
        for dp_group, held in zip(dp_groups, where, strict=True)
        for role, (engine, sizes) in dp_group.roles.items()
    )
    return Plan(
        pipeline.graph_id,
        ranks,
        make_channels(pipeline, ranks),
        layouts,
        process_groups(layouts),
        # what waits in the host's memory may have to be sent from there
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
