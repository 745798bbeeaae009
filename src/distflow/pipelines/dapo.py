"""DAPO: GRPO that replaces groups without a signal. The other parts of DAPO are settings of its
preset."""

from distflow.config import Config, preset_config
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines.policy_gradient import policy_gradient


def dapo_pipeline(config: Config | None = None) -> TaskGraph:
    """The nodes of GRPO, with `dynamic_sampling` if `algorithm.filter_groups.enable` is on."""
    pipeline = Pipeline("dapo_training_pipeline", "GRPO with dynamic sampling (arXiv:2503.14476)")
    return policy_gradient(pipeline, config or preset_config("dapo"))
