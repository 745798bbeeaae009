"""The heap of this process, where its C library is glibc.

Which pipeline a config runs: a built-in one by name, the user's function, or nodes given in YAML.

A run whose finished prompt groups a function of the user's accepts or rejects, as one more node of its pipeline.

The pipeline of a config, bound to it, here and on a worker.
"""

import ctypes
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from distflow.algorithms.objective import PolicyObjective
from distflow.config import Config
from distflow.config.derived_settings import CUSTOM, pipeline_name
from distflow.data.batch import Batch
from distflow.data.prompts import PROMPT_FIELDS
from distflow.errors import UserError, users_place
from distflow.graph import (
    BoundNode,
    BoundPipeline,
    Drop,
    NodeRole,
    Pipeline,
    PipelineError,
    TaskGraph,
    pipeline_from_config,
)
from distflow.graph.fields import MissingColumn, innermost
from distflow.graph.nodes import Node
from distflow.import_target import LoadError, load_function, load_modules
from distflow.launch.devices import planes_threads
from distflow.pipelines.nodes.objectives import may_derive_old
from distflow.pipelines.nodes.rollout_and_reward import load_responses
from distflow.pipelines.nodes.scoring import score_policy, weigh_once_apart
from distflow.pipelines.nodes.updates import train_unscored_actor, update
from distflow.planning.plan import plan_local
from distflow.planning.threads import own_cores
from distflow.registry import PIPELINES
from distflow.runtime.errors import is_ours
from distflow.runtime.spec import Spec

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_THRESHOLD = 2**25  # in bytes; of more glibc takes none


def keep_freed_memory() -> None:
    """What is freed stays with this process, but for blocks of 32 MiB and more. By itself glibc gives the end of its
    heap back to the system whenever that is free, and gets it anew in the next micro-batch, a page fault for every
    4 KiB: 2 to 6 % of a step on a CPU. The peak is the same."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, -1)  # never
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)


_WRITERS = {
    "ref_log_prob": "compute_ref_log_prob writes it; actor_rollout_ref.actor.use_kl_loss=false trains without",
    "old_log_probs": "compute_old_log_prob writes it",
    "values": "compute_value writes it",
    "advantages": "compute_advantage writes it",
    "token_level_scores": "compute_reward writes it",
}
"""What writes a column of the standard nodes, for a pipeline that lacks it."""


def select_pipeline(config: Config) -> TaskGraph:
    """The pipeline of `config`. Raises PipelineError or UserError where the user's own cannot be built."""
    name = pipeline_name(config)
    if name != CUSTOM:
        return cast(TaskGraph, _made(load_function(PIPELINES[name].target), config))
    if config.dag.custom_pipeline_fn:
        return _custom(config.dag.custom_pipeline_fn, config)
    return pipeline_from_config("yaml_pipeline", [dict(entry) for entry in config.dag.nodes])


def bound(graph: TaskGraph, config: Config) -> BoundPipeline:
    """The pipeline with the config's options and the columns of data sets. Raises PipelineError, which says of a column
    that nothing writes which of the standard nodes would."""
    try:
        pipeline = graph.bind(config, PROMPT_FIELDS)
        return _unscored(graph, pipeline, config) if may_derive_old(config) else pipeline
    except MissingColumn as err:
        if err.column not in _WRITERS:
            raise
        raise PipelineError(f"{err}. A node with distflow.pipelines.nodes:{_WRITERS[err.column]}") from err


def generates(pipeline: BoundPipeline) -> bool:
    """Whether it learns from answers that are sampled, not from those of the rows: it uses the rollout engine, or
    judges what it makes, and does not load answers."""
    if any(innermost(node.fn) is load_responses for node in pipeline.nodes):
        return False
    makes = (NodeRole.ROLLOUT, NodeRole.REWARD)
    return "rollout" in pipeline.engines or any(node.node_role in makes for node in pipeline.nodes)


def _unscored(graph: TaskGraph, pipeline: BoundPipeline, config: Config) -> BoundPipeline:
    """The pipeline without the forward pass for old log-probs, where the built-in update alone reads them.

    A function of the user's that is handed the whole batch may read them.
    """
    scoring = [node for node in pipeline.nodes if innermost(node.fn) in (score_policy, weigh_once_apart)]
    updates = [node for node in pipeline.nodes if innermost(node.fn) is update and _takes_policy_loss(node)]
    columns = {"old_log_probs", "rollout_is_weights"}
    for node in pipeline.nodes:
        is_handed = not is_ours(node) and "batch" in node.contract.reserved and node.plane == "training"
        reads = columns & {*node.contract.reads, *node.contract.optional}
        if node not in scoring and node not in updates and (reads or is_handed):
            return pipeline
    if not scoring or len(updates) != 1:
        return pipeline
    for node in scoring:
        graph.remove_node(node.node_id)
    graph.update_node(updates[0].node_id, func=train_unscored_actor)
    return graph.bind(config, PROMPT_FIELDS)


def _takes_policy_loss(node: BoundNode) -> bool:
    return isinstance(node.fn, partial) and isinstance(node.fn.keywords["objective"], PolicyObjective)


def _custom(path: str, config: Config) -> TaskGraph:
    try:
        make_graph = load_function(path)
    except LoadError as err:
        raise UserError(f"dag.custom_pipeline_fn: {err}") from err
    _check_parameters(make_graph, path)
    try:
        graph = _made(make_graph, config)
    except PipelineError:
        raise
    except Exception as err:  # the edge of a user's code
        place = users_place(err) or "unknown place"
        raise UserError(f"dag.custom_pipeline_fn={path} raised {type(err).__name__}: {err} (at {place})") from err
    if not isinstance(graph, TaskGraph):
        raise UserError(
            f"dag.custom_pipeline_fn={path} returned {_kind(graph)}; it must return what "
            f"Pipeline.build() gives, a TaskGraph{_AS_ONE if _are_graphs(graph) else ''}"
        )
    return graph


def _check_parameters(make_graph: Callable[..., object], path: str) -> None:
    """Raises UserError for a function that needs more than the config."""
    required = [
        name
        for name, parameter in inspect.signature(make_graph).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise UserError(
            f"dag.custom_pipeline_fn={path} takes ({', '.join(required)}): a pipeline's function takes the config, or "
            "nothing"
        )


def _made(make_graph: Callable[..., object], config: Config) -> object:
    """A pipeline's function may take the config, or nothing."""
    return make_graph(config) if inspect.signature(make_graph).parameters else make_graph()


_AS_ONE = (
    ": add the nodes of all to one graph; parts of it that have nothing to do with one another run side by side, on "
    "devices of their own (docs/planning.md)"
)


def _are_graphs(made: object) -> bool:
    return isinstance(made, list | tuple) and any(isinstance(each, TaskGraph) for each in made)


def _kind(graph: object) -> str:
    if graph is None:
        return "nothing"
    return "a Pipeline that is not built" if isinstance(graph, Pipeline) else type(graph).__name__


REJECTED = "rejected"


def accepting(spec: Spec, should_accept: Callable[[Batch], object]) -> Spec:
    """The same run, with this node behind all others of the rollout loop. It does not leave this process."""

    def accept(batch: Batch) -> Drop | None:
        return None if should_accept(batch) else Drop(REJECTED)

    graph = select_pipeline(spec.config).copy()
    before = tuple(node.node_id for node in spec.pipeline().rollout_nodes)
    graph.add_node(Node("should_accept", accept, before, writes=(), scope="group", plane="rollout", validates=False))
    pipeline = bound(graph, spec.config)

    def made() -> BoundPipeline:
        return pipeline

    return replace(spec, pipeline=made, plan=plan_local(pipeline, spec.plan.ranks[0].device))


_MAX_THREADS = 1024


def bind(config: Config) -> BoundPipeline:
    """The pipeline of a config, bound to it and to the columns that data sets have. Raises PipelineError."""
    return bound(select_pipeline(config), config)


def rebuild(config: Config) -> BoundPipeline:
    """The same on a worker, which is to be made ready and has the user's modules to import first."""
    make_process_ready(config)
    import_user_modules(config)
    return bind(config)


def make_process_ready(config: Config) -> None:
    """Its heap, and its threads before any of them starts: results are bit-equal for one number of threads only.
    Raises UserError for more than can be meant."""
    keep_freed_memory()
    trainer, rollout = planes_threads(config)
    for key, threads in (("trainer", trainer), ("actor_rollout_ref.rollout", rollout)):
        if (threads or 0) > _MAX_THREADS:
            most = f"set it to at most the cores of this machine, {os.cpu_count()}"
            raise UserError(f"{key}.num_threads={threads}: {most}")
    if trainer is None and "OMP_NUM_THREADS" not in os.environ:  # which is meant
        trainer = min(torch.get_num_threads(), own_cores())  # torch does not look at a container's share of time
    if trainer is not None:
        torch.set_num_threads(trainer)


def import_user_modules(config: Config) -> None:
    """Those of `trainer.imports`, which register estimators, losses, columns."""
    try:
        load_modules(config.trainer.imports)
    except LoadError as err:
        raise UserError(f"trainer.imports: {err}") from err
