"""RLVR: domains side by side, each with its verifiers and its own way from rewards to advantages (ROLL's pipeline)."""

from distflow.config import Config, preset_config
from distflow.config.derived_settings import reads_values
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.grpo import estimate_advantages, roll_out_and_score, score


def rlvr_pipeline(config: Config | None = None) -> TaskGraph:
    """Answer, judge, score, make advantages of each domain's rewards, update; with a critic where an estimator, the
    run's or a domain's, reads values. config: that of the preset, if not given."""
    config = config or preset_config("rlvr")
    pipeline = Pipeline("rlvr_training_pipeline", "Verifiable rewards of several domains (arXiv:2506.06122)")
    roll_out_and_score(pipeline, config)
    score(pipeline, config)
    if reads_values(config):
        pipeline.add_node("compute_value", nodes.compute_value, only_forward_compute=True)
    estimate_advantages(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_actor)
    if reads_values(config):
        pipeline.add_node("critic_train", nodes.train_critic)
    return pipeline.build()
