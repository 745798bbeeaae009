"""A policy trained on pairs of responses, without sampling: DPO, IPO, SimPO and ORPO, which differ
in `algorithm.preference_loss` alone."""

from distflow.algorithms.registry import find_preference_loss
from distflow.config import Config
from distflow.graph import NodeType, Pipeline, TaskGraph
from distflow.pipelines import nodes


def preference_pipeline(config: Config) -> TaskGraph:
    """Load pairs, score them by the reference if the loss reads it, update towards the chosen
    responses."""
    pipeline = Pipeline("preference_training_pipeline", "Preference optimisation on pairs")
    pipeline.add_node("load_pairs", nodes.load_pairs, node_type=NodeType.DATA_LOAD)
    if find_preference_loss(config.algorithm.preference_loss).has_reference:
        pipeline.add_node(
            "reference_log_prob", nodes.compute_ref_log_prob, only_forward_compute=True
        )
    pipeline.add_node("actor_train", nodes.train_preference)
    return pipeline.build()
