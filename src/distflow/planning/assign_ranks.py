"""The plan of a pipeline over many devices, from the allocation if there is one, else from the
scheduler: the pipeline's independent parts share the devices (`independent_parts`) and are placed
on machines (`place_parts`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import is_one_process, offload_keys
from distflow.config.keys.reward import scoring_models
from distflow.errors import UserError
from distflow.graph import BoundNode, BoundPipeline
from distflow.planning.allocation_expression import (
    KEY,
    Allocation,
    check_agreement,
    parse_allocation,
)
from distflow.planning.independent_parts import Part, apportion, pipeline_parts, priority
from distflow.planning.layouts import Layout, Ranks, Sizes, choose_backends, process_groups
from distflow.planning.place_parts import place
from distflow.planning.plan import Plan, RankPlan, make_channels, plan_local, rank_plan

Roles = dict[str, tuple[str, Sizes]]
"""Engine and sizes of each role."""


@dataclass(frozen=True)
class DpGroup:
    """Devices that run the same nodes."""

    devices: tuple[int, ...]
    """Ascending; device d is on machine d // `trainer.n_gpus_per_node`."""
    nodes: frozenset[str]
    roles: Roles
    """Of the models that they hold."""


def plan_devices(
    pipeline: BoundPipeline,
    config: Config,
    device: str,
    count_sizes: Callable[[], Mapping[str, str | float]],
) -> Plan:
    """The plan of a run, before it starts and for `distflow plan` alike. device: of each worker.
    count_sizes: counts the parameters of each role's model, where the scheduler needs them. Raises
    UserError with the key."""
    if is_one_process(config):
        return plan_local(pipeline, device)

    several = bool(config.trainer.devices) or len(pipeline_parts(pipeline, {})) > 1
    if several and not config.trainer.allocation:
        sizes = count_sizes()
    else:
        sizes = {}

    plan = plan_ray(pipeline, config, device, sizes)
    if config.trainer.launcher == "local":
        _check_alike(plan)
    return plan


def _check_alike(plan: Plan) -> None:
    """Raises UserError if processes of the local launcher would not all do the same."""
    for rank in plan.ranks:
        if rank.nodes != plan.ranks[0].nodes:
            raise UserError(
                "trainer.launcher=local: each of its processes generates and trains, but the plan "
                f"gives rank {rank.rank} different nodes than rank 0: join all parts of "
                "trainer.allocation with '|', or set trainer.launcher=ray"
            )


def plan_ray(
    pipeline: BoundPipeline, config: Config, device: str, sizes: Mapping[str, str | float]
) -> Plan:
    """One rank per device: `trainer.nnodes` machines with `trainer.n_gpus_per_node` each, or
    `trainer.devices` of them.

    device: of each worker, as it sees it. sizes: parameters of the model of each role, for the
    scheduler.
    Raises UserError for an allocation that cannot be read, contradicts another key or does not fit
    the pipeline, and for too few devices.
    """
    if config.trainer.allocation:
        dp_groups = _allocated(pipeline, config)
    else:
        dp_groups = _scheduled(pipeline, config, sizes)

    _check_engines_lie_together(pipeline, dp_groups)
    devices = sorted(chain.from_iterable(dp_group.devices for dp_group in dp_groups))
    rank_of = {number: rank for rank, number in enumerate(devices)}

    layouts = []
    nodes_of: dict[int, frozenset[str]] = {}
    for dp_group in dp_groups:
        group_ranks = tuple(rank_of[number] for number in dp_group.devices)
        nodes_of |= dict.fromkeys(group_ranks, dp_group.nodes)
        for role, (engine, model_sizes) in dp_group.roles.items():
            shard = _shard(role, engine, model_sizes, config)
            layouts.append(Layout(role, engine, group_ranks, model_sizes, shard))

    ranks = []
    for rank, number in enumerate(devices):
        nodes = nodes_of[rank]
        generating = [node.node_id for node in pipeline.rollout_nodes if node.node_id in nodes]
        training = [node.node_id for node in pipeline.training_nodes if node.node_id in nodes]
        machine = number // config.trainer.n_gpus_per_node
        ranks.append(rank_plan(pipeline, rank, device, generating, training, machine))

    ranks = [replace(rank, rollout_group=_rollout_group(rank, ranks, layouts)) for rank in ranks]

    # An offloaded engine may have to send from host memory, which nccl cannot.
    threshold = 1 if offload_keys(config) else config.dag.backend_threshold

    return Plan(
        pipeline.graph_id,
        tuple(ranks),
        make_channels(pipeline, ranks),
        tuple(layouts),
        process_groups(layouts),
        choose_backends(device, len(ranks), threshold),
    )


# From an allocation


def _allocated(pipeline: BoundPipeline, config: Config) -> list[DpGroup]:
    allocation = parse_allocation(config.trainer.allocation or "")
    check_agreement(allocation, config)
    judges = {name for name, model in scoring_models(config.reward_model).items() if model.judge}
    _check_roles(pipeline, allocation, config.actor_rollout_ref.rollout.name, judges)

    roles_of = []
    shares = []
    for group in allocation.groups:
        roles_of.append({part.role: (part.engine, part.sizes) for part in group})
        shares.append(group[0].sizes.num_devices)

    main = next((roles for roles in roles_of if "actor" in roles), roles_of[0])
    for role in sorted(pipeline.engines):
        if allocation.find(role) is not None:
            continue
        if role == "rollout" or "actor" not in main:  # any other role may be placed with it
            raise UserError(
                f"{KEY}='{allocation.text}' lacks the {role}, which pipeline '{pipeline.graph_id}' "
                "has"
            )

        engine, sizes = main["actor"]
        if role in judges:
            engine = config.actor_rollout_ref.rollout.name
        main[role] = (engine, sizes)

    dp_groups = []
    for devices, roles in zip(_placed(shares, config), roles_of, strict=True):
        nodes = _nodes_of(pipeline, roles, is_main=roles is main)
        dp_groups.append(DpGroup(devices, nodes, roles))

    return dp_groups


def _check_roles(
    pipeline: BoundPipeline, allocation: Allocation, rollout_engine: str, judges: set[str]
) -> None:
    """Raises UserError for a part that the pipeline lacks, that has the wrong
    engine, or that shares devices with another size."""
    for part in allocation.parts:
        if part.role not in pipeline.engines:
            has = ", ".join(sorted(pipeline.engines)) or "none"
            part.refuse(f"pipeline '{pipeline.graph_id}' has no {part.role}; its engines: {has}")

        if part.role in judges and part.engine != rollout_engine:
            needs = f"that of the rollout, {rollout_engine}"
            part.refuse(f"the engine of '{part.role}' must be {needs}")

        if part.role not in {"rollout", *judges} and part.engine in ROLLOUT_ENGINES:
            part.refuse(f"the engine of '{part.role}' must be one that trains")

    for group in allocation.groups:
        trained = [part for part in group if part.role != "rollout"]
        for part in trained:
            if part.sizes != trained[0].sizes:
                part.refuse(
                    f"'{part.role}' needs the sizes of '{trained[0].role}', because they share "
                    "devices and steps"
                )


def _nodes_of(
    pipeline: BoundPipeline, roles: Mapping[str, object], is_main: bool
) -> frozenset[str]:
    """The nodes of a dp group: those that use its engines, and those without engines that they wait
    for.

    The whole rollout loop is where the rollout engine is, or where training is if nothing
    generates. Nodes without an engine for which no node with one waits belong to the main dp group.
    """
    rollout_nodes = {node.node_id for node in pipeline.rollout_nodes}
    wanted = {node.node_id for node in pipeline.training_nodes if set(node.engines) & set(roles)}
    if is_main:
        wanted |= _idle_ends(pipeline)

    for node in reversed(pipeline.training_nodes):
        if node.node_id in wanted:
            wanted |= {dep for dep in node.deps if not pipeline.node(dep).engines} - rollout_nodes

    if "rollout" in roles or "rollout" not in pipeline.engines:
        wanted |= rollout_nodes
    return frozenset(wanted)


def _idle_ends(pipeline: BoundPipeline) -> set[str]:
    """Nodes of the training loop without an engine for which no node with one waits."""
    needed: set[str] = set()
    idle = set()
    for node in reversed(pipeline.training_nodes):
        if node.engines or node.node_id in needed:
            needed.update(node.deps)
        else:
            idle.add(node.node_id)

    return idle


# From the scheduler


def _scheduled(
    pipeline: BoundPipeline, config: Config, sizes: Mapping[str, str | float]
) -> list[DpGroup]:
    num_devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    parts = pipeline_parts(pipeline, sizes, num_devices)

    dp_groups = []
    for part, devices in zip(parts, _devices_of(parts, config), strict=True):
        roles = {role: _model(role, config, len(devices)) for role in part.engines}
        dp_groups.append(DpGroup(devices, frozenset(part.nodes), roles))

    return dp_groups


def _devices_of(parts: Sequence[Part], config: Config) -> Sequence[tuple[int, ...]]:
    """The devices in `trainer.devices`, else all. Raises UserError if they are for another number
    of parts."""
    chosen = config.trainer.devices
    num_devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if not chosen and len(parts) == 1:
        return (tuple(range(num_devices)),)
    if not chosen:
        return share_devices([parts], config)[0]

    named = [*chain.from_iterable(chosen)]
    are_there = len({*named} & {*range(num_devices)}) == len(named)
    if not all(chosen) or len(chosen) != len(parts) or not are_there:
        raise UserError(
            f"trainer.devices={[*map(list, chosen)]}: write one list for each of the "
            f"{len(parts)} independent parts, of different numbers below {num_devices}, or remove "
            "it"
        )

    return chosen


def share_devices(
    pipelines: Sequence[Sequence[Part]], config: Config
) -> list[tuple[tuple[int, ...], ...]]:
    """The devices of each part of pipelines that run concurrently.

    pipelines: the parts of each, in the order of `pipeline_parts`. Raises UserError for fewer
    devices than parts.
    """
    num_devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    parts_of_all: list[tuple[int, Part]] = []
    for number, parts in enumerate(pipelines):
        parts_of_all += [(number, part) for part in parts]
    parts_of_all.sort(key=lambda numbered: priority(numbered[1]))

    sizes = [part.size for _, part in parts_of_all]
    shares = apportion(sizes, num_devices, config.dag.apportion_strategy)
    devices_of: list[tuple[tuple[int, ...], ...]] = [()] * len(pipelines)
    for (number, _), devices in zip(parts_of_all, _placed(shares, config), strict=True):
        devices_of[number] += (devices,)
    return devices_of


def _placed(shares: Sequence[int], config: Config) -> list[tuple[int, ...]]:
    trainer = config.trainer
    dag = config.dag
    return place(
        shares,
        trainer.nnodes,
        trainer.n_gpus_per_node,
        dag.consider_node_cohesion,
        dag.consider_node_load,
    )


def _model(role: str, config: Config, num_devices: int) -> tuple[str, Sizes]:
    """Engine and sizes of a role on so many devices."""
    rollout = config.actor_rollout_ref.rollout
    if role != "rollout":
        model = scoring_models(config.reward_model).get(role)
        if model is not None and model.judge:
            return rollout.name, Sizes(data=num_devices)
        return config.actor_rollout_ref.actor.strategy, Sizes(data=num_devices)

    tensor = rollout.tensor_model_parallel_size
    if num_devices % tensor:
        raise UserError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor} does not divide the "
            f"{num_devices} devices"
        )

    return rollout.name, Sizes(data=num_devices // tensor, tensor=tensor)


# From both


def _rollout_group(own: RankPlan, ranks: Sequence[RankPlan], layouts: Sequence[Layout]) -> Ranks:
    """The ranks that share a rollout engine; empty if each device has one. Raises UserError if they
    span machines."""
    for layout in layouts:
        if layout.role != "rollout" or own.rank not in layout.ranks or layout.sizes.tensor == 1:
            continue

        group = layout.line("tensor", own.rank)
        machines = {ranks[rank].node for rank in group}
        if len(machines) > 1:
            raise UserError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={layout.sizes.tensor}: "
                f"ranks {', '.join(map(str, group))} would share an engine, and are on "
                f"{len(machines)} machines: set a size that divides the rollout's devices on each "
                "machine"
            )

        return group

    return ()


def _check_engines_lie_together(pipeline: BoundPipeline, dp_groups: Sequence[DpGroup]) -> None:
    """Raises UserError for a node with engines on different devices, and for a rollout engine on
    devices that train another model than the policy: new weights cannot arrive during that
    training."""
    training_nodes = {node.node_id for node in pipeline.training_nodes}
    for dp_group in dp_groups:
        is_apart = "actor" in pipeline.engines and "actor" not in dp_group.roles
        if is_apart and "rollout" in dp_group.roles and dp_group.nodes & training_nodes:
            beside = ", ".join(f"'{role}'" for role in dp_group.roles if role != "rollout")
            raise UserError(
                f"{KEY}: the rollout is on the devices of {beside} and not on those of 'actor': "
                "join it with 'actor' by '|', or separate them by '+'"
            )

    for node in pipeline.nodes:
        for dp_group in dp_groups:
            if node.node_id in dp_group.nodes:
                _check_engines_of(node, dp_group)


def _check_engines_of(node: BoundNode, dp_group: DpGroup) -> None:
    apart = [engine for engine in node.engines if engine not in dp_group.roles]
    if not apart:
        return

    here = [f"'{engine}'" for engine in dp_group.roles if engine in node.engines]
    others = here[0] if here else "the engines of its plane"
    raise UserError(
        f"{KEY}: node '{node.node_id}' uses '{apart[0]}', which is not on the devices "
        f"of {others}: join them with '|'"
    )


def _shard(role: str, engine: str, sizes: Sizes, config: Config) -> int | None:
    """Number of neighbours along tokens that share one copy of a model's weights; None for all, or
    for no sharding."""
    if role == "rollout" or engine != "fsdp":
        return None

    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    if size in (-1, sizes.tokens):
        return None
    if not size or sizes.tokens % size:
        raise UserError(
            f"actor_rollout_ref.actor.fsdp_config.fsdp_size={size} does not divide the "
            f"{sizes.tokens} data parallel ranks of the {role} (d × c): set it to a divisor, or to "
            "-1 for all of them"
        )
    if size * sizes.tensor % sizes.expert:
        raise UserError(
            f"{KEY}: the {role}'s experts are divided over {sizes.expert} ranks, but only "
            f"{size * sizes.tensor} share one copy of the weights "
            f"(actor_rollout_ref.actor.fsdp_config.fsdp_size={size}): remove fsdp_size, or lower e"
        )

    return size
