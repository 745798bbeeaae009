"""A reward model trained on pairs of responses: a decoder with a scalar head and the Bradley-Terry
loss."""

from distflow.config import Config
from distflow.graph import NodeType, Pipeline, TaskGraph
from distflow.pipelines import nodes


def rm_pipeline(config: Config | None = None) -> TaskGraph:
    """Load pairs, update towards the chosen responses; the same for every config."""
    return (
        Pipeline(
            "rm_training_pipeline", "Reward model from preference pairs (Bradley and Terry, 1952)"
        )
        .add_node("load_pairs", nodes.load_pairs, node_type=NodeType.DATA_LOAD)
        .add_node("actor_train", nodes.train_reward_model)
        .build()
    )
