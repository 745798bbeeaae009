"""Which program a config runs: a built-in one by name, the user's function, or nodes given in YAML."""

from collections.abc import Callable
from typing import Any

from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.places import users_place
from distflow.config.program import CUSTOM, program_name
from distflow.graph import PipelineError, TaskGraph, pipeline_from_config
from distflow.graph.functions import resolve_func
from distflow.pipelines.dapo import dapo_pipeline
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.ppo import ppo_pipeline
from distflow.pipelines.sft import sft_pipeline

BUILTIN: dict[str, Callable[[], TaskGraph]] = {
    "grpo": grpo_pipeline,
    "ppo": ppo_pipeline,
    "dapo": dapo_pipeline,
    "sft": sft_pipeline,
}


def select_pipeline(config: Config) -> TaskGraph:
    """The program of `config`. Raises PipelineError or UserError where the user's own cannot be built."""
    name = program_name(config)
    if name != CUSTOM:
        return BUILTIN[name]()
    if config.dag.custom_pipeline_fn:
        return _custom(config.dag.custom_pipeline_fn)
    return pipeline_from_config("yaml_pipeline", [dict(entry) for entry in config.dag.nodes])


def _custom(path: str) -> TaskGraph:
    make_graph = resolve_func(path, "dag.custom_pipeline_fn")
    try:
        graph: Any = make_graph()
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
