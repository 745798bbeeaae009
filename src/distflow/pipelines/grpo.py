"""GRPO: a group's own mean is the baseline; no critic."""

from distflow.graph import NodeRole, Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.stages import answer_and_judge, score, update_actor


def grpo_pipeline() -> TaskGraph:
    """Answer, judge, score by the trainer, compare in groups, update."""
    return group_relative(Pipeline("grpo_training_pipeline", "Group-relative policy optimisation (arXiv:2402.03300)"))


def group_relative(pipeline: Pipeline) -> TaskGraph:
    """The nodes of GRPO and of those that differ from it by numbers only."""
    score(answer_and_judge(pipeline))
    pipeline.add_node(
        "calculate_advantages",
        nodes.compute_advantage,
        ["kl_penalty", "mismatch_weights"],
        node_role=NodeRole.ADVANTAGE,
    )
    return update_actor(pipeline).build()
