"""PPO: a critic's values are the baseline."""

from distflow.config import Config, preset_config
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.grpo import estimate_advantages, prepare_training_data, roll_out_and_score


def ppo_pipeline(config: Config | None = None) -> TaskGraph:
    """Generate, reward, compute log-probs and values, estimate advantages, update actor and critic. config: the
    preset's by default."""
    config = config or preset_config("ppo")
    pipeline = Pipeline("ppo_training_pipeline", "Proximal policy optimisation with a critic (arXiv:1707.06347)")
    roll_out_and_score(pipeline, config)
    prepare_training_data(pipeline, config)
    pipeline.add_node("compute_value", nodes.compute_value, only_forward_compute=True)
    estimate_advantages(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_actor)
    pipeline.add_node("critic_train", nodes.train_critic)
    return pipeline.build()
