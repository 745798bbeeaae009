"""Lists the auditor's checks in the order in which they run, and generates their table in
`docs/trust.md`."""

from dataclasses import replace
from functools import partial

from distflow.audit.audited_step import rescored_samples, token_level_rewards, updates
from distflow.audit.audited_step.advantages import audit_advantages, audit_moments, over_step
from distflow.audit.audited_step.curriculum_and_skipped_rows import (
    audit_curriculum,
    audit_skipped_rows,
)
from distflow.audit.audited_step.custom_estimator_and_loss import audit_custom_functions
from distflow.audit.audited_step.engine_weights_and_draws import (
    audit_marked,
    audit_sampled_tokens,
    audit_versions,
    audit_weights,
    remember_marked,
)
from distflow.audit.audited_step.episodes import audit_episodes
from distflow.audit.audited_step.groups_responses_and_masks import (
    audit_groups,
    audit_kept,
    audit_masks,
    audit_responses,
    audit_rows,
    audit_turns,
    remember_domains,
)
from distflow.audit.audited_step.log_probs import audit_log_probs, audit_reference
from distflow.audit.audited_step.loss import audit_correction, audit_loss, audit_value_clips
from distflow.audit.audited_step.metrics import (
    audit_metrics,
    audit_sample_rows,
    audit_staleness,
    audit_step_metrics,
    remember_trained,
)
from distflow.audit.check import Check
from distflow.audit.data_plan_and_rows import audit_data
from distflow.audit.resume_and_loaded_weights import audit_loaded, audit_resume
from distflow.audit.validation import audit_validation
from distflow.config import Config
from distflow.config.derived_settings import algorithms

REMEMBERED_BEFORE = (
    token_level_rewards.remember_rewards,
    remember_domains,
    remember_trained,
    remember_marked,
)
"""Run in every step before its checks, to keep what these and later steps' checks need."""

REMEMBERED_AFTER = (token_level_rewards.remember_coefficients,)
"""The same, run after its checks, which need what the previous step kept."""

AT_START: tuple[Check, ...] = (audit_data, audit_loaded)
"""Run on the `AuditedRun`, before anything is generated."""

OF_VALIDATION: tuple[Check, ...] = (audit_validation,)
"""Run on each validation."""

LOOK_BEFORE: tuple[Check, ...] = (
    audit_turns,
    audit_weights,
    audit_log_probs,
    audit_versions,
    audit_sampled_tokens,
    audit_reference,
)
"""Run before the first update of steps that are not audited, on one sample from a few groups."""

BEFORE: tuple[Check, ...] = (audit_resume, *LOOK_BEFORE, updates.audit_backward)
"""Run before the step's first update, since they run the models with the weights that scored the
step."""

AFTER: tuple[Check, ...] = (
    audit_groups,
    audit_responses,
    audit_masks,
    audit_episodes,
    rescored_samples.audit_reward_functions,
    rescored_samples.audit_judge_answers,
    rescored_samples.audit_dropped,
    token_level_rewards.audit_rewards,
    token_level_rewards.audit_kl_control,
    audit_correction,
    audit_advantages,
    audit_custom_functions,
    updates.audit_mini_batches,
    audit_loss,
    updates.audit_gradients,
    updates.audit_optimizer,
    audit_metrics,
    audit_sample_rows,
)
"""Run at the step's end."""

OF_EVERY_STEP: tuple[Check, ...] = (
    replace(audit_advantages, run=rescored_samples.audit_ranks),
    replace(updates.audit_gradients, run=updates.audit_leftover),
    replace(updates.audit_optimizer, run=updates.audit_reach),
)
"""Run at the end of every step that is not audited: what the scores of one group made of its
advantages, whether an update began with gradients of another, and how far weights moved."""

OF_MOST_STEPS: tuple[Check, ...] = (
    replace(audit_responses, run=audit_rows),
    replace(audit_groups, run=audit_kept),
    replace(updates.audit_mini_batches, run=updates.audit_each_sample_once),
    replace(updates.audit_optimizer, run=updates.audit_learning_rates),
    updates.audit_gradients,
    replace(audit_loss, run=audit_value_clips),
    replace(token_level_rewards.audit_rewards, run=token_level_rewards.audit_totals),
    replace(audit_advantages, run=audit_moments),
    replace(
        rescored_samples.audit_dropped, run=partial(rescored_samples.check_dropped, calls=False)
    ),
    replace(audit_metrics, run=audit_step_metrics),
)
"""Checks that are cheap enough for most steps: rows and filter of groups, mini-batches, learning
rates, sum and norm of each gradient, terms of each loss, sums of scores, mean and variance of
whitened advantages, dropped groups, and metrics of samples and updates."""

OF_LOOKS: tuple[Check, ...] = (*OF_MOST_STEPS[:-1], audit_metrics)
"""The same for steps with a look."""

LOOK_AFTER = tuple(
    check
    for check in AFTER
    if check.name not in ("groups", "dropped", "user_code", "mini-batches", "metrics")
)
"""Run at the end of steps that are not audited, on a few groups and one update of each model."""

OF_ALL_GROUPS = (token_level_rewards.audit_rewards, audit_advantages)
"""Run in a look on the whole step, if `compares_all_groups`."""

QUICK_LOOK = tuple(
    check for check in LOOK_AFTER if check.name not in ("responses", "reward_results", "kl_control")
)
"""Run there on one group if a look costs too much; neither models nor reward functions are run."""

OF_A_GROUP: tuple[Check, ...] = (
    audit_responses,
    audit_turns,
    audit_episodes,
    rescored_samples.audit_reward_functions,
)
"""Run on finished groups of workers that only generate, within the time for looks; no reward
function is called."""

AT_RELEASE: tuple[Check, ...] = (audit_curriculum, audit_skipped_rows)
"""Run in every step on its metrics, once the sample queue has added its own."""

OF_RELEASED: tuple[Check, ...] = (
    replace(audit_metrics, run=audit_staleness),
    replace(audit_versions, run=audit_marked),
)
"""The same, run in most steps."""

CHECKS = (
    *AT_START,
    *AFTER[:11],
    *BEFORE,
    *AFTER[11:],
    *OF_VALIDATION,
    audit_curriculum,
    audit_skipped_rows,
)
"""All checks in the order of a step, for documentation."""


def compares_all_groups(config: Config) -> bool:
    """Whether rewards or advantages are relative to those of other groups of the step."""
    return any(
        over_step(own) or token_level_rewards.over_step(own) for _, own in algorithms(config)
    )
