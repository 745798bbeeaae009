"""Supervised fine-tuning: the same loop, with the data set's responses instead of sampled ones."""

from distflow.config import Config
from distflow.graph import NodeType, Pipeline, TaskGraph
from distflow.pipelines import nodes


def sft_pipeline(config: Config | None = None) -> TaskGraph:
    """Load responses, update towards them; the same for every config."""
    return (
        Pipeline("sft_training_pipeline", "Supervised fine-tuning")
        .add_node("load_responses", nodes.load_responses, node_type=NodeType.DATA_LOAD)
        .add_node("actor_train", nodes.train_sft)
        .build()
    )
