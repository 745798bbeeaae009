"""RLVR: several domains, each with its own reward functions and way from rewards to advantages (ROLL's pipeline)."""

from distflow.config import Config, preset_config
from distflow.config.derived_settings import reads_values
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.grpo import estimate_advantages, prepare_training_data, roll_out_and_score


def rlvr_pipeline(config: Config | None = None) -> TaskGraph:
    """Generate, reward, compute log-probs, estimate advantages by domain, update; with a critic where an estimator of
    the run or of a domain reads values. config: the preset's by default."""
    config = config or preset_config("rlvr")
    pipeline = Pipeline("rlvr_training_pipeline", "Verifiable rewards of several domains (arXiv:2506.06122)")
    roll_out_and_score(pipeline, config)
    prepare_training_data(pipeline, config)
    if reads_values(config):
        pipeline.add_node("compute_value", nodes.compute_value, only_forward_compute=True)
    estimate_advantages(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_actor)
    if reads_values(config):
        pipeline.add_node("critic_train", nodes.train_critic)
    return pipeline.build()
