"""Which program a config runs: a built-in one by name, the user's function, or nodes given in YAML."""

import inspect
from collections.abc import Callable
from typing import cast

from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.functions import LoadError, load_function
from distflow.config.names import PIPELINES
from distflow.config.places import users_place
from distflow.config.program import CUSTOM, program_name
from distflow.graph import PipelineError, TaskGraph, pipeline_from_config


def select_pipeline(config: Config) -> TaskGraph:
    """The program of `config`. Raises PipelineError or UserError where the user's own cannot be built."""
    name = program_name(config)
    if name != CUSTOM:
        return cast(TaskGraph, _made(load_function(PIPELINES[name].target), config))
    if config.dag.custom_pipeline_fn:
        return _custom(config.dag.custom_pipeline_fn, config)
    return pipeline_from_config("yaml_pipeline", [dict(entry) for entry in config.dag.nodes])


def _custom(path: str, config: Config) -> TaskGraph:
    try:
        make_graph = load_function(path)
    except LoadError as err:
        raise UserError(f"dag.custom_pipeline_fn: {err}") from err
    try:
        graph = _made(make_graph, config)
    except PipelineError:
        raise
    except Exception as err:  # the edge of a user's code
        place = users_place(err) or "unknown place"
        raise UserError(f"dag.custom_pipeline_fn={path} raised {type(err).__name__}: {err} (at {place})") from err
    if not isinstance(graph, TaskGraph):
        raise UserError(
            f"dag.custom_pipeline_fn={path} returned {type(graph).__name__}; "
            "it must return what Pipeline.build() gives, a TaskGraph"
        )
    return graph


def _made(make_graph: Callable[..., object], config: Config) -> object:
    """A program's function may take the config, or nothing."""
    return make_graph(config) if inspect.signature(make_graph).parameters else make_graph()
