"""The plan of a pipeline over many devices, from the allocation if there is one, else from the
scheduler.

`place` then chooses the ranks of each part, on machines with equally many devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import is_one_process, offload_keys
from distflow.config.keys.reward import scoring_models
from distflow.errors import UserError
from distflow.graph import BoundPipeline
from distflow.planning.allocation_expression import (
    KEY,
    Allocation,
    check_agreement,
    parse_allocation,
)
from distflow.planning.independent_parts import Part, apportion, pipeline_parts, priority
from distflow.planning.plan_of_ranks_and_layouts import (
    Layout,
    Plan,
    RankPlan,
    Sizes,
    choose_backends,
    make_channels,
    plan_local,
    process_groups,
    rank_plan,
)


@dataclass(frozen=True)
class DpGroup:
    """Ranks that run the same nodes. roles: engine and sizes of each role whose model they hold."""

    num_devices: int
    nodes: frozenset[str]
    roles: Mapping[str, tuple[str, Sizes]]


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
    sizes = count_sizes() if several and not config.trainer.allocation else {}
    plan = plan_ray(pipeline, config, device, sizes)
    if config.trainer.launcher == "local":
        _check_alike(plan)
    return plan


def _check_alike(plan: Plan) -> None:
    """Raises UserError if processes of the local launcher would not all do the same."""
    first = plan.ranks[0]
    for rank in plan.ranks:
        if (rank.rollout_nodes, rank.training_nodes) != (first.rollout_nodes, first.training_nodes):
            raise UserError(
                "trainer.launcher=local: each of its processes generates and trains, but the plan "
                "gives rank "
                f"{rank.rank} different nodes than rank 0: join all parts of trainer.allocation "
                "with '|', or set "
                "trainer.launcher=ray"
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
    num_nodes = config.trainer.nnodes
    size = config.trainer.n_gpus_per_node
    dag = config.dag
    if config.trainer.allocation:
        allocation = parse_allocation(config.trainer.allocation)
        check_agreement(allocation, config)
        dp_groups = _allocated(pipeline, allocation, config)
        shares = [dp_group.num_devices for dp_group in dp_groups]
        devices = tuple(
            place(shares, num_nodes, size, dag.consider_node_cohesion, dag.consider_node_load)
        )
    else:
        parts = pipeline_parts(pipeline, sizes, num_nodes * size)
        devices = _devices_of(parts, config)
        dp_groups = [
            DpGroup(
                len(own),
                frozenset(part.nodes),
                {role: _model(role, config, len(own)) for role in part.engines},
            )
            for part, own in zip(parts, devices, strict=True)
        ]
    _check_engines_lie_together(pipeline, dp_groups)
    device_of = sorted(number for own in devices for number in own)  # by rank
    places = [tuple(map(device_of.index, own)) for own in devices]
    nodes_of = {
        rank: dp_group.nodes
        for dp_group, own in zip(dp_groups, places, strict=True)
        for rank in own
    }
    ranks = tuple(
        rank_plan(
            pipeline,
            rank,
            device,
            [node.node_id for node in pipeline.rollout_nodes if node.node_id in nodes_of[rank]],
            [node.node_id for node in pipeline.training_nodes if node.node_id in nodes_of[rank]],
            number // size,
        )
        for rank, number in enumerate(device_of)
    )
    layouts = tuple(
        Layout(role, engine, own, model_sizes, _shard(role, engine, model_sizes, config))
        for dp_group, own in zip(dp_groups, places, strict=True)
        for role, (engine, model_sizes) in dp_group.roles.items()
    )
    ranks = tuple(
        replace(rank, rollout_group=_rollout_group(rank, ranks, layouts)) for rank in ranks
    )
    # An offloaded engine may have to send from host memory, which nccl cannot.
    backends = choose_backends(
        device, len(ranks), 1 if offload_keys(config) else dag.backend_threshold
    )
    channels = make_channels(pipeline, ranks)
    return Plan(pipeline.graph_id, ranks, channels, layouts, process_groups(layouts), backends)


def _allocated(pipeline: BoundPipeline, allocation: Allocation, config: Config) -> list[DpGroup]:
    rollout_engine = config.actor_rollout_ref.rollout.name
    judges = {
        name for name, model in scoring_models(config.reward_model).items() if model.is_whole_judge
    }
    for part in allocation.parts:
        if part.role not in pipeline.engines:
            has = ", ".join(sorted(pipeline.engines)) or "none"
            allocation.refuse(
                part.at, f"pipeline '{pipeline.graph_id}' has no {part.role}; its engines: {has}"
            )
        is_wrong = (
            part.engine != rollout_engine if part.role in judges else part.engine in ROLLOUT_ENGINES
        )
        if is_wrong and part.role != "rollout":
            own = f"that of the rollout, {rollout_engine}, if it is not sharded"
            needs = own if part.role in judges else "one that trains"
            allocation.refuse(part.at, f"the engine of '{part.role}' must be {needs}")
    for group in allocation.groups:
        first, *others = [part for part in group if part.role != "rollout"] or [group[0]]
        for part in (part for part in others if part.sizes != first.sizes):
            needs = (
                f"'{part.role}' needs the sizes of '{first.role}', because they share devices and "
                "steps"
            )
            allocation.refuse(part.at, needs)
    groups = [
        {part.role: (part.engine, part.sizes) for part in group} for group in allocation.groups
    ]
    main = next((roles for roles in groups if "actor" in roles), groups[0])
    for role in sorted(pipeline.engines):
        if allocation.find(role) is None:
            if role == "rollout" or "actor" not in main:  # any other role may be placed with it
                raise UserError(
                    f"{KEY}='{allocation.text}' lacks the {role}, which pipeline "
                    f"'{pipeline.graph_id}' has"
                )
            main[role] = (rollout_engine if role in judges else main["actor"][0], main["actor"][1])
    return [
        DpGroup(
            group[0].sizes.num_devices, _nodes_of(pipeline, roles, is_main=roles is main), roles
        )
        for group, roles in zip(allocation.groups, groups, strict=True)
    ]


def share_devices(
    pipelines: Sequence[Sequence[Part]], config: Config
) -> list[tuple[tuple[int, ...], ...]]:
    """The devices of each part of pipelines that run concurrently: device d is on machine d //
    `n_gpus_per_node`.

    pipelines: the parts of each, in the order of `pipeline_parts`. Raises UserError for fewer
    devices than parts.
    """
    trainer = config.trainer
    dag = config.dag
    of_pipelines = ((part, number) for number, parts in enumerate(pipelines) for part in parts)
    all_parts = sorted(of_pipelines, key=lambda each: priority(each[0]))
    num_nodes = trainer.nnodes
    size = trainer.n_gpus_per_node
    shares = apportion(
        [part.size for part, _ in all_parts], num_nodes * size, dag.apportion_strategy
    )
    places = place(shares, num_nodes, size, dag.consider_node_cohesion, dag.consider_node_load)
    placed = [(number, own) for (_, number), own in zip(all_parts, places, strict=True)]
    return [
        tuple(own for number, own in placed if number == wanted) for wanted in range(len(pipelines))
    ]


def _devices_of(parts: Sequence[Part], config: Config) -> tuple[tuple[int, ...], ...]:
    """The devices in `trainer.devices`, else all. Raises UserError if they are for another number
    of parts."""
    given = config.trainer.devices
    num_devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if not given and len(parts) == 1:
        return (tuple(range(num_devices)),)
    if not given:
        return share_devices([parts], config)[0]
    # Those keys were used when the command divided devices over several pipelines, so they are not
    # a mistake.
    _ = (
        config.dag.apportion_strategy,
        config.dag.consider_node_cohesion,
        config.dag.consider_node_load,
    )
    named = [number for own in given for number in own]
    if (
        not all(given)
        or len(given) != len(parts)
        or len({*named} & {*range(num_devices)}) < len(named)
    ):
        wanted = (
            f"one list for each of the {len(parts)} independent parts, of different numbers below "
            f"{num_devices}"
        )
        raise UserError(
            f"trainer.devices={[list(own) for own in given]}: write {wanted}, or remove it"
        )
    return given


def _model(role: str, config: Config, num_devices: int) -> tuple[str, Sizes]:
    rollout = config.actor_rollout_ref.rollout
    model = scoring_models(config.reward_model).get(role)
    if role != "rollout":
        is_judge = model is not None and model.is_whole_judge
        return rollout.name if is_judge else config.actor_rollout_ref.actor.strategy, Sizes(
            data=num_devices
        )
    tensor = rollout.tensor_model_parallel_size
    if num_devices % tensor:
        raise UserError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor} does not divide the "
            f"{num_devices} devices"
        )
    return rollout.name, Sizes(data=num_devices // tensor, tensor=tensor)


def _rollout_group(
    own: RankPlan, ranks: Sequence[RankPlan], layouts: Sequence[Layout]
) -> tuple[int, ...]:
    """The ranks that share a rollout engine; empty if each device has one. Raises UserError if they
    span machines."""
    layout = next(
        (layout for layout in layouts if layout.role == "rollout" and own.rank in layout.ranks),
        None,
    )
    if layout is None or layout.sizes.tensor == 1:
        return ()
    group = layout.line("tensor", own.rank)
    if len(machines := {ranks[rank].node for rank in group}) > 1:
        raise UserError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={layout.sizes.tensor}: ranks "
            f"{', '.join(map(str, group))} would share an engine, and are on {len(machines)} "
            "machines: set a size that "
            "divides the rollout's devices on each machine"
        )
    return group


def _nodes_of(
    pipeline: BoundPipeline, roles: Mapping[str, object], is_main: bool
) -> frozenset[str]:
    """The nodes of a dp group: those that use its engines, and those without engines that they wait
    for.

    The whole rollout loop is where the rollout engine is, or where training is if nothing
    generates. Nodes without an engine for which no node with one waits belong to the main dp group.
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
    """Nodes of the training loop without an engine for which no node with one waits."""
    needed: set[str] = set()
    for node in reversed(pipeline.training_nodes):
        if node.engines or node.node_id in needed:
            needed.update(node.deps)
    return {node.node_id for node in pipeline.training_nodes if not node.engines} - needed


def _check_engines_lie_together(pipeline: BoundPipeline, dp_groups: Sequence[DpGroup]) -> None:
    """Raises UserError for a node with engines on different devices, and for a rollout engine on
    devices that train another model than the policy: new weights cannot arrive during that
    training."""
    training_nodes = {node.node_id for node in pipeline.training_nodes}
    for dp_group in dp_groups:
        is_apart = "rollout" in dp_group.roles and "actor" in pipeline.engines - set(dp_group.roles)
        if is_apart and dp_group.nodes & training_nodes:
            beside = ", ".join(f"'{role}'" for role in dp_group.roles if role != "rollout")
            raise UserError(
                f"{KEY}: the rollout is on the devices of {beside} and not on those of 'actor': "
                "join it with "
                "'actor' by '|', or separate them by '+'"
            )
    for node in pipeline.nodes:
        for dp_group in dp_groups:
            apart = [engine for engine in node.engines if engine not in dp_group.roles]
            if node.node_id in dp_group.nodes and apart:
                here = next(
                    (f"'{engine}'" for engine in dp_group.roles if engine in node.engines), None
                )
                raise UserError(
                    f"{KEY}: node '{node.node_id}' uses '{apart[0]}', which is not on the devices "
                    "of "
                    f"{here or 'the engines of its plane'}: join them with '|'"
                )


def _shard(role: str, engine: str, sizes: Sizes, config: Config) -> int | None:
    """Number of neighbours along data that share one copy of a model's weights; None for all, or
    for no sharding."""
    if role == "rollout" or engine != "fsdp":
        return None
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    if size in (-1, sizes.data):
        return None
    if sizes.data % size:
        raise UserError(
            f"actor_rollout_ref.actor.fsdp_config.fsdp_size={size} does not divide the "
            f"{sizes.data} data parallel "
            f"ranks of the {role}: set it to a divisor, or to -1 for all of them"
        )
    return size


def place(
    shares: Sequence[int], num_nodes: int, size: int, cohesion: bool = True, load: bool = True
) -> list[tuple[int, ...]]:
    """The ranks of each part, ascending; rank r is on machine r // size. shares: devices of each
    part; together all of the `num_nodes` machines with `size` devices each.

    cohesion: place each part that fits on one machine on one, best for later parts (`_cost` looks
    ahead); all others then take as few machines as they can. load: among equally suitable machines,
    prefer the one with fewer busy devices; then lower ranks.
    """
    assert sum(shares) == num_nodes * size, (
        f"shares {shares} are not the {num_nodes * size} devices"
    )
    free = [list(range(node * size, node * size + size)) for node in range(num_nodes)]
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
                node = (
                    holes.index(max(holes))
                    if load
                    else next(node for node, hole in enumerate(holes) if hole)
                )
            ranks[part] += _take(free[node], min(wanted, holes[node]) if cohesion else 1)
    return [tuple(sorted(found)) for found in ranks]


def _best_node(share: int, holes: list[int], later: list[int], size: int, load: bool) -> int | None:
    """The machine with room for a part that costs later parts least; None if no machine has
    room."""
    costs: dict[int, tuple[int, int]] = {}
    for hole in {hole for hole in holes if hole >= share}:
        left = holes.copy()
        left[left.index(hole)] -= share
        costs[hole] = _cost(later, left, size)
    fits = [node for node, hole in enumerate(holes) if hole in costs]
    return min(
        fits, key=lambda node: (costs[holes[node]], -holes[node] if load else 0, node), default=None
    )


def _cost(shares: list[int], holes: list[int], size: int) -> tuple[int, int]:
    """(parts that fit on one machine but span several, pieces of parts) after tight packing."""
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
            share = share - piece
            holes[node] = holes[node] - piece
            pieces = pieces + 1
    return len(left), pieces


def _filling(shares: list[int], hole: int) -> list[int]:
    """Those of the descending shares that fill a hole best, preferring the largest ones."""
    best: dict[int, list[int]] = {0: []}  # shares by their sum
    for share in shares:
        for total, chosen in list(best.items()):
            if total + share <= hole:
                best.setdefault(total + share, [*chosen, share])
    return best[max(best)]


def _next_node(wanted: int, holes: list[int]) -> int:
    """The place of the next piece of a part: the smallest hole with room for all of it, else the
    largest."""
    enough = [hole for hole in holes if hole >= wanted]
    return holes.index(min(enough) if enough else max(holes))


def _take(free: list[int], count: int) -> list[int]:
    taken = free[:count]
    free[:count] = []
    return taken
