"""Which program a config runs: a built-in one by name, the user's function, or nodes given in YAML."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import cast

from distflow.algorithms.objective import PolicyObjective
from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.functions import LoadError, load_function
from distflow.config.names import PIPELINES
from distflow.config.places import users_place
from distflow.config.program import CUSTOM, program_name
from distflow.data.prompts import PROMPT_FIELDS
from distflow.graph import BoundNode, NodeRole, Pipeline, PipelineError, Program, TaskGraph, pipeline_from_config
from distflow.graph.errors import MissingColumn
from distflow.graph.functions import innermost
from distflow.pipelines.nodes.experience import load_answers
from distflow.pipelines.nodes.scoring import score_policy, weigh_once_apart
from distflow.pipelines.nodes.updates import train_unscored_actor, update
from distflow.pipelines.objectives import may_derive_old
from distflow.runtime.blame import is_ours

_WRITERS = {
    "ref_log_prob": "compute_ref_log_prob writes it; actor_rollout_ref.actor.use_kl_loss=false trains without",
    "old_log_probs": "compute_old_log_prob writes it",
    "values": "compute_value writes it",
    "advantages": "compute_advantage writes it",
    "token_level_scores": "compute_reward writes it",
}
"""What writes a column of the standard nodes, for a program that lacks it."""


def select_pipeline(config: Config) -> TaskGraph:
    """The program of `config`. Raises PipelineError or UserError where the user's own cannot be built."""
    name = program_name(config)
    if name != CUSTOM:
        return cast(TaskGraph, _made(load_function(PIPELINES[name].target), config))
    if config.dag.custom_pipeline_fn:
        return _custom(config.dag.custom_pipeline_fn, config)
    return pipeline_from_config("yaml_pipeline", [dict(entry) for entry in config.dag.nodes])


def bound(graph: TaskGraph, config: Config) -> Program:
    """The program with the config's options and the columns of data sets. Raises PipelineError, which says of a column
    that nothing writes which of the standard nodes would."""
    try:
        program = graph.bind(config, PROMPT_FIELDS)
        return _unscored(graph, program, config) if may_derive_old(config) else program
    except MissingColumn as err:
        if err.column not in _WRITERS:
            raise
        raise PipelineError(f"{err}. A node with distflow.pipelines.nodes:{_WRITERS[err.column]}") from err


def generates(program: Program) -> bool:
    """Whether it learns from answers that are sampled, not from those of the rows: it uses the rollout engine, or
    judges what it makes, and does not load answers."""
    if any(innermost(node.fn) is load_answers for node in program.nodes):
        return False
    makes = (NodeRole.ROLLOUT, NodeRole.REWARD)
    return "rollout" in program.engines or any(node.node_role in makes for node in program.nodes)


def _unscored(graph: TaskGraph, program: Program, config: Config) -> Program:
    """The program without the forward pass for old log-probs, where the built-in update alone reads them.

    A function of the user's that is handed the whole batch may read them.
    """
    scoring = [node for node in program.nodes if innermost(node.fn) in (score_policy, weigh_once_apart)]
    updates = [node for node in program.nodes if innermost(node.fn) is update and _takes_policy_loss(node)]
    columns = {"old_log_probs", "rollout_is_weights"}
    for node in program.nodes:
        is_handed = not is_ours(node) and "batch" in node.contract.reserved and node.plane == "learning"
        reads = columns & {*node.contract.reads, *node.contract.optional}
        if node not in scoring and node not in updates and (reads or is_handed):
            return program
    if not scoring or len(updates) != 1:
        return program
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
            f"dag.custom_pipeline_fn={path} takes ({', '.join(required)}): a program's function takes the config, or "
            "nothing"
        )


def _made(make_graph: Callable[..., object], config: Config) -> object:
    """A program's function may take the config, or nothing."""
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
