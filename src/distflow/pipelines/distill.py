"""Distillation: a teacher scores the policy's own samples. Every pipeline of RL has teachers if the
config names some; this one requires them, and its preset gives rewards no weight."""

from distflow.config import Config
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines.policy_gradient import policy_gradient


def distill_pipeline(config: Config) -> TaskGraph:
    """Generate, score by reward functions and teachers, update."""
    pipeline = Pipeline("distill_training_pipeline", "On-policy distillation (arXiv:2306.13649)")
    return policy_gradient(pipeline, config)
