"""RLVR: several domains, each with its own reward functions and advantage settings (ROLL's
pipeline)."""

from distflow.config import Config, preset_config
from distflow.config.derived_settings import reads_values
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines.policy_gradient import policy_gradient


def rlvr_pipeline(config: Config | None = None) -> TaskGraph:
    """The nodes of GRPO, with advantages by domain, and a critic if an estimator of the run or of a
    domain reads values. config: the preset's by default."""
    config = config or preset_config("rlvr")
    pipeline = Pipeline(
        "rlvr_training_pipeline", "Verifiable rewards of several domains (arXiv:2506.06122)"
    )
    return policy_gradient(pipeline, config, has_critic=reads_values(config))
