"""A policy trained on preferences: on given pairs of responses (DPO, IPO, SimPO and ORPO, which
differ in `algorithm.preference_loss` alone), on given responses with labels (KTO), or on pairs of
its own responses (online DPO, arXiv:2402.04792)."""

from distflow.algorithms.registry import find_preference_loss
from distflow.config import Config
from distflow.graph import NodeType, Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.policy_gradient import roll_out_and_score


def preference_pipeline(config: Config) -> TaskGraph:
    """Load pairs, score them by the reference if the loss reads it, update towards the chosen
    responses."""
    pipeline = Pipeline("preference_training_pipeline", "Preference optimisation on pairs")
    pipeline.add_node("load_pairs", nodes.load_pairs, node_type=NodeType.DATA_LOAD)
    _score_by_reference(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_preference)
    return pipeline.build()


def kto_pipeline(config: Config | None = None) -> TaskGraph:
    """Load labelled responses, score them and mismatched ones by the reference, update."""
    pipeline = Pipeline("kto_training_pipeline", "Kahneman-Tversky optimisation (arXiv:2402.01306)")
    return (
        pipeline.add_node("load_responses", nodes.load_responses, node_type=NodeType.DATA_LOAD)
        .add_node("labels", nodes.read_labels, plane="training")
        .add_node("reference_log_prob", nodes.compute_ref_log_prob, only_forward_compute=True)
        .add_node("mismatched_log_prob", nodes.score_mismatched, only_forward_compute=True)
        .add_node("actor_train", nodes.train_kto)
        .build()
    )


def online_dpo_pipeline(config: Config) -> TaskGraph:
    """Generate, reward, pair the best with the worst response of each group, score by the
    reference if the loss reads it, update towards the better ones."""
    pipeline = Pipeline("online_dpo_training_pipeline", "Preference optimisation on own responses")
    roll_out_and_score(pipeline, config)
    nodes.score_by_models(pipeline, config, ["function_reward"])
    pipeline.add_node("choose_pairs", nodes.choose_pairs, plane="training")
    _score_by_reference(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_online_preference)
    return pipeline.build()


def _score_by_reference(pipeline: Pipeline, config: Config) -> None:
    if find_preference_loss(config.algorithm.preference_loss).has_reference:
        pipeline.add_node(
            "reference_log_prob", nodes.compute_ref_log_prob, only_forward_compute=True
        )
