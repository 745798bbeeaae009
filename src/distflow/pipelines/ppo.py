"""PPO: a critic's values are the baseline."""

from distflow.config import Config, preset_config
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines.policy_gradient import policy_gradient


def ppo_pipeline(config: Config | None = None) -> TaskGraph:
    """GRPO's nodes, with values before the advantages and an update of the critic. config: the
    preset's by default."""
    pipeline = Pipeline(
        "ppo_training_pipeline", "Proximal policy optimisation with a critic (arXiv:1707.06347)"
    )
    return policy_gradient(pipeline, config or preset_config("ppo"), has_critic=True)
