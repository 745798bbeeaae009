"""GRPO: a group's own mean is the baseline; no critic."""

from distflow.config import Config, preset_config
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines.policy_gradient import policy_gradient


def grpo_pipeline(config: Config | None = None) -> TaskGraph:
    """Generate, reward, compute log-probs, compare in groups, update. config: the preset's by
    default."""
    pipeline = Pipeline(
        "grpo_training_pipeline", "Group-relative policy optimisation (arXiv:2402.03300)"
    )
    return policy_gradient(pipeline, config or preset_config("grpo"))
