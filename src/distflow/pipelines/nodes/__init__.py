"""The standard nodes of the built-in pipelines; each does the part of a step that its name says."""

from distflow.pipelines.nodes.advantages import (
    apply_kl_penalty,
    clip_advantages,
    clip_rewards,
    compute_advantage,
    mask_samples,
    normalize_advantages,
    normalize_rewards,
    select_tokens,
    weigh_samples,
    whiten_rewards,
)
from distflow.pipelines.nodes.filter_groups import dynamic_sampling, filter_groups
from distflow.pipelines.nodes.labelled_responses import read_labels, score_mismatched
from distflow.pipelines.nodes.own_pairs import choose_pairs
from distflow.pipelines.nodes.reward_samples import compute_reward, greedy_baseline, take_scores
from distflow.pipelines.nodes.rollout_correction import (
    correct_mismatch,
    reject_mismatch,
)
from distflow.pipelines.nodes.sample_responses import generate, load_pairs, load_responses
from distflow.pipelines.nodes.scored_tokens import (
    compute_old_log_prob,
    compute_ref_log_prob,
    compute_value,
)
from distflow.pipelines.nodes.scoring_models import add_model_scores, ask_model, score_by_models
from distflow.pipelines.nodes.teachers import score_by_teachers
from distflow.pipelines.nodes.updates import (
    train_actor,
    train_critic,
    train_kto,
    train_online_preference,
    train_preference,
    train_reward_model,
    train_sft,
)
from distflow.pipelines.nodes.workflow_rollout import run_workflow
