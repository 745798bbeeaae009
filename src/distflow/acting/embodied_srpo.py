"""Embodied SRPO: a policy acts in a simulator, and its failures earn rewards by their distance to
successes."""

from distflow.acting.episode_columns import simulator_columns
from distflow.acting.srpo_nodes import embed, embodied_sampling, srpo_reward
from distflow.config import Config, preset_config
from distflow.config.derived_settings import algorithms
from distflow.config.keys.algorithm import AlgorithmConfig, is_on
from distflow.errors import UserError
from distflow.graph import Pipeline, TaskGraph
from distflow.pipelines import nodes
from distflow.pipelines.policy_gradient import estimate_advantages, prepare_training_data

_OF_REWARDS = (
    "reward_shift",
    "reward_scale",
    "reward_clip",
    "whiten_rewards",
    "use_kl_in_reward",
    "reward_level",
)


def embodied_srpo_pipeline(config: Config | None = None) -> TaskGraph:
    """Act, filter by success, embed, compare failures with successes over all ranks, update.
    config: the preset's by default. Raises UserError for settings that would change the rewards in
    another way."""
    config = config or preset_config("embodied_srpo")
    _check(config)
    pipeline = Pipeline(
        "embodied_grpo_training_pipeline", "GRPO in a simulator, with rewards of SRPO"
    )
    pipeline.add_node("rollout_actor", nodes.run_workflow)
    pipeline.add_node("function_reward", nodes.take_scores)
    pipeline.add_node("simulator_columns", simulator_columns)
    pipeline.add_node(
        "embodied_sampling", embodied_sampling, ["simulator_columns"], validates=False
    )
    pipeline.add_node("embedding", embed, ["embodied_sampling"], validates=False)
    pipeline.add_node("compute_reward", srpo_reward, ["embedding"], plane="training")
    prepare_training_data(pipeline, config)
    estimate_advantages(pipeline, config)
    pipeline.add_node("actor_train", nodes.train_actor)

    return pipeline.build()


def _check(config: Config) -> None:
    if (workflow := config.actor_rollout_ref.rollout.workflow) != "simulator":
        raise UserError(
            f"actor_rollout_ref.rollout.workflow={workflow}: embodied_srpo acts in a simulator: "
            "set it to simulator"
        )

    usual = AlgorithmConfig()
    for name, each in algorithms(config):
        changed = [key for key in _OF_REWARDS if getattr(each, key) != getattr(usual, key)]
        if wrong := ["reward_norm"] * is_on(each.reward_norm) + changed:
            where = f"algorithm.domains.{name}" if name else "algorithm"
            raise UserError(
                f"{where}.{wrong[0]}: SRPO sets the rewards: remove it (srpo.reward_coef scales "
                "them)"
            )
