"""DAPO: GRPO that replaces groups without a signal. The other parts of DAPO are numbers of its preset."""

from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines.grpo import group_relative


def dapo_pipeline() -> TaskGraph:
    """The nodes of GRPO, of which `algorithm.filter_groups.enable` keeps `dynamic_sampling`."""
    return group_relative(Pipeline("dapo_training_pipeline", "GRPO with dynamic sampling (arXiv:2503.14476)"))
