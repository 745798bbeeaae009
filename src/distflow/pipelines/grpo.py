"""GRPO: a group's own mean is the baseline; no critic."""

from distflow.config import Config, preset_config
from distflow.graph import NodeType, Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.stages import answer_and_judge, score


def grpo_pipeline(config: Config | None = None) -> TaskGraph:
    """Answer, judge, score by the trainer, compare in groups, update. config: that of the preset, if not given."""
    pipeline = Pipeline("grpo_training_pipeline", "Group-relative policy optimisation (arXiv:2402.03300)")
    return group_relative(pipeline, config or preset_config("grpo"))


def group_relative(pipeline: Pipeline, config: Config) -> TaskGraph:
    """The nodes of GRPO and of those that differ from it by numbers only."""
    answer_and_judge(pipeline, config)
    score(pipeline, config)
    pipeline.add_node("calculate_advantages", nodes.compute_advantage)
    pipeline.add_node("actor_train", nodes.train_actor, node_type=NodeType.MODEL_TRAIN)
    return pipeline.build()
