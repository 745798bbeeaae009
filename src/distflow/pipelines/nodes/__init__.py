"""The standard nodes of the built-in pipelines: each is one verb of the story that a pipeline tells."""

from distflow.pipelines.nodes.normalizing import (
    clip_advantages,
    clip_rewards,
    mask_samples,
    normalize_advantages,
    normalize_rewards,
    weigh_samples,
    whiten_rewards,
)
from distflow.pipelines.nodes.rollout_and_reward import (
    compute_reward,
    dynamic_sampling,
    generate,
    greedy_baseline,
    load_responses,
)
from distflow.pipelines.nodes.scoring import (
    apply_kl_penalty,
    compute_advantage,
    compute_old_log_prob,
    compute_ref_log_prob,
    compute_value,
    correct_mismatch,
    mend_mismatch,
    reject_mismatch,
    select_tokens,
)
from distflow.pipelines.nodes.updates import train_actor, train_critic, train_sft

__all__ = [
    "weigh_samples",
    "whiten_rewards",
    "mask_samples",
    "clip_rewards",
    "clip_advantages",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_old_log_prob",
    "compute_ref_log_prob",
    "compute_reward",
    "compute_value",
    "correct_mismatch",
    "dynamic_sampling",
    "generate",
    "greedy_baseline",
    "load_responses",
    "mend_mismatch",
    "normalize_advantages",
    "normalize_rewards",
    "reject_mismatch",
    "select_tokens",
    "train_actor",
    "train_critic",
    "train_sft",
]
