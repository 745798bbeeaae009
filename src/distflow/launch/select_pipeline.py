"""Selects the pipeline of a config (a built-in one, the user's function, or nodes in YAML), and
binds it to the config, here and on a worker."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

from distflow.algorithms.objectives import PolicyObjective
from distflow.builtin_names import PIPELINES
from distflow.config import Config, Loaded, with_changes
from distflow.config.compose.fit_defaults_to_data import NamedKey, is_free
from distflow.config.derived_settings import CUSTOM, WORKFLOW, pipeline_name, policies_of, policy_of
from distflow.config.rules.sizes import Change
from distflow.data.encoded_prompts import PROMPT_FIELDS
from distflow.errors import MissingColumn, UserError, blaming, hint
from distflow.graph import (
    BoundNode,
    BoundPipeline,
    Drop,
    NodeRole,
    NodeType,
    PipelineError,
    TaskGraph,
    pipeline_from_config,
)
from distflow.graph.graph_node import Node
from distflow.import_target import (
    innermost,
    is_ours,
    load_function,
    load_modules,
    required_parameters,
    users_code,
)
from distflow.launch.threads import make_process_ready
from distflow.pipelines.nodes.filter_groups import drop_unless
from distflow.pipelines.nodes.objectives_from_config import may_derive_old
from distflow.pipelines.nodes.sample_responses import load_responses
from distflow.pipelines.nodes.scored_tokens import score_policy
from distflow.pipelines.nodes.updates import train_unscored_actor, update
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.sample_queue.submissions import Submissions, WithSubmitted
from distflow.runtime.spec import Spec

_WRITERS = {
    "ref_log_prob": (
        "compute_ref_log_prob writes it; actor_rollout_ref.actor.use_kl_loss=false trains without "
        "it"
    ),
    "old_log_probs": "compute_old_log_prob writes it",
    "teacher_log_probs": (
        "score_by_teacher writes it; without distill.teacher.path and distill.teachers no loss "
        "reads it"
    ),
    "values": "compute_value writes it",
    "advantages": "compute_advantage writes it",
    "token_level_scores": "compute_reward writes it",
    "turn_index": "episodes have it: set actor_rollout_ref.rollout.workflow",
    "turn_order": "episodes have it: set actor_rollout_ref.rollout.workflow",
}
"""The standard node that writes each column, for pipelines that lack it."""


def select_pipeline(config: Config) -> TaskGraph:
    """The pipeline of a config with one policy. Raises PipelineError or UserError if a custom one
    cannot be built."""
    graph = _whole_graph(config)
    known = policies_of(config)

    for node in graph.nodes.values():
        if node.policy is not None and node.policy not in known:
            raise PipelineError(
                f"{node.where} is of the policy '{node.policy}', which the config does not "
                f"have{hint(node.policy, known)}: declare it, e.g. dag.policies={{{node.policy}: "
                "{model: {path: DIR}}}"
            )

    return graph.path_of(policy_of(config))


def _whole_graph(config: Config) -> TaskGraph:
    name = pipeline_name(config)
    pipeline = config.dag.pipeline

    if name != CUSTOM:
        return cast(
            TaskGraph, _call_pipeline_function(load_function(PIPELINES[name].target), config)
        )

    assert pipeline is not None, "a pipeline of the user's is named by dag.pipeline"
    if isinstance(pipeline, str):
        return _custom(pipeline, config)
    return pipeline_from_config("yaml_pipeline", pipeline)


def bind_graph(graph: TaskGraph, config: Config) -> BoundPipeline:
    """The pipeline with the config's options and the columns of data sets. Raises PipelineError,
    which names the standard node that would write a missing column."""
    try:
        pipeline = graph.bind(config, PROMPT_FIELDS)
    except MissingColumn as err:
        if config.dag.policies:
            where = f"on the path of the policy '{policy_of(config)}'"
            raise MissingColumn(f"{err} {where}", err.column) from err
        if err.column not in _WRITERS:
            raise

        raise PipelineError(
            f"{err}. A node with distflow.pipelines.nodes:{_WRITERS[err.column]}"
        ) from err

    using = [graph.nodes[node.node_id] for node in pipeline.nodes if "actor" in node.engines]
    if config.dag.policies and all(node.only_forward_compute for node in using):
        raise PipelineError(
            f"no node of the pipeline '{graph.graph_id}' trains the policy '{policy_of(config)}'"
        )
    if may_derive_old(config):
        return _unscored(graph, pipeline, config)

    return pipeline


def keys_of_nodes(config: Config) -> Iterator[NamedKey]:
    """The keys that nodes without a function of their own name: the data set of a `DATA_LOAD` node,
    the workflow of an `ENV_INTERACT` node."""
    for node in select_pipeline(config).nodes.values():
        if node.configures and node.node_type is NodeType.DATA_LOAD:
            yield from ((f"data.{name}", value, node.where) for name, value in node.options.items())
        elif node.configures:
            options = dict(node.options)
            yield WORKFLOW, options.pop("workflow", "environment"), node.where
            yield f"{WORKFLOW}_kwargs", options, node.where


def generates(pipeline: BoundPipeline) -> bool:
    """Whether it trains on sampled responses rather than the rows' own: it uses the rollout engine
    or has a reward node, and does not load responses."""
    if any(innermost(node.fn) is load_responses for node in pipeline.nodes):
        return False
    makes = (NodeRole.ROLLOUT, NodeRole.REWARD)
    return "rollout" in pipeline.engines or any(node.node_role in makes for node in pipeline.nodes)


def _unscored(graph: TaskGraph, pipeline: BoundPipeline, config: Config) -> BoundPipeline:
    """The pipeline without the forward pass for old log-probs, if only the built-in update reads
    them.

    A user's function that receives the whole batch may read them.
    """
    scoring = [node for node in pipeline.nodes if innermost(node.fn) is score_policy]
    updates = [
        node for node in pipeline.nodes if innermost(node.fn) is update and takes_policy_loss(node)
    ]

    for node in pipeline.nodes:
        gets_batch = (
            not is_ours(node.fn) and "batch" in node.contract.reserved and node.plane == "training"
        )
        reads = "old_log_probs" in (*node.contract.reads, *node.contract.optional)
        if node not in scoring and node not in updates and (reads or gets_batch):
            return pipeline

    if not scoring or len(updates) != 1:
        return pipeline

    for node in scoring:
        graph.remove_node(node.node_id)
    graph.update_node(updates[0].node_id, func=train_unscored_actor)
    return graph.bind(config, PROMPT_FIELDS)


def takes_policy_loss(node: BoundNode) -> bool:
    """Whether its function comes from `train_actor`, the only one that reports its loss terms."""
    return isinstance(node.fn, partial) and isinstance(
        node.fn.keywords.get("objective"), PolicyObjective
    )


def _custom(path: str, config: Config) -> TaskGraph:
    with blaming("dag.pipeline"):
        make_graph = load_function(path)

    if len(required := required_parameters(make_graph)) > 1:
        raise UserError(
            f"dag.pipeline={path} takes ({', '.join(required)}): it may take the config, or no "
            "parameter"
        )

    with users_code(f"dag.pipeline={path} raised", passes=PipelineError):
        graph = _call_pipeline_function(make_graph, config)
    if isinstance(graph, TaskGraph):
        return graph

    raise UserError(
        f"dag.pipeline={path} returned a {type(graph).__name__}; it must return one TaskGraph, as "
        "Pipeline.build() does"
    )


def _call_pipeline_function(make_graph: Callable[..., object], config: Config) -> object:
    """Call a pipeline's function, which may take the config or nothing."""
    if inspect.signature(make_graph).parameters:
        return make_graph(config)
    return make_graph()


def bind(config: Config) -> BoundPipeline:
    """The pipeline of a config, bound to it and to the columns of data sets. Raises
    PipelineError."""
    return bind_graph(select_pipeline(config), config)


def without_reference(loaded: Loaded, bind: Callable[[Config], object] = bind) -> Sequence[Change]:
    """The change that switches a preset's KL loss off, if the pipeline binds only without it; else
    none."""
    change = (
        "actor_rollout_ref.actor.use_kl_loss",
        False,
        "no node of the pipeline computes ref_log_prob",
    )
    if loaded.config.actor_rollout_ref.actor.use_kl_loss and is_free(loaded.origins, change[0]):
        for changes in ([], [change]):
            with suppress(PipelineError):
                bind(with_changes(loaded, changes).config)
                return changes

    return []


def rebuild(config: Config) -> BoundPipeline:
    """The bound pipeline on a worker, after preparing its process and importing the user's
    modules."""
    make_process_ready(config)
    import_user_modules(config)
    return bind(config)


def for_own_loop(spec: Spec, submissions: Submissions) -> Spec:
    """The spec of a worker for a user's own loop: with the rows that it submits, and a last node in
    the rollout loop that calls the `should_accept` of each group."""

    def accept(group: Group) -> Drop | None:
        should_accept = submissions.of_group(group.prompt_group.row).should_accept
        if should_accept is None:
            return None
        return drop_unless(should_accept(group.batch()))

    before = tuple(node.node_id for node in rebuild(spec.config).rollout_nodes)
    graph = select_pipeline(spec.config).copy()
    graph.add_node(
        Node(
            "should_accept",
            accept,
            before,
            writes=(),
            scope="group",
            plane="rollout",
            validates=False,
        )
    )
    pipeline = bind_graph(graph, spec.config)

    return replace(spec, rows=WithSubmitted(spec.rows, submissions), pipeline=lambda: pipeline)


def import_user_modules(config: Config) -> None:
    """Import the modules of `trainer.imports`, which register estimators, losses, columns."""
    with blaming("trainer.imports"):
        load_modules(config.trainer.imports)
