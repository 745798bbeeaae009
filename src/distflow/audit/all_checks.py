"""Lists the auditor's checks in the order in which they run, and makes their table in `docs/trust.md`."""

from dataclasses import replace

from distflow.audit import rewards, updates
from distflow.audit.advantages import audit_advantages
from distflow.audit.curriculum import audit_curriculum
from distflow.audit.custom_functions import audit_custom_functions
from distflow.audit.loaded_rows import audit_data
from distflow.audit.log_probs import audit_log_probs, audit_reference
from distflow.audit.loss import audit_correction, audit_loss
from distflow.audit.metrics import audit_metrics
from distflow.audit.recorded_data import Check
from distflow.audit.resume import audit_resume
from distflow.audit.sampled_tokens import audit_sampled_tokens
from distflow.audit.samples import audit_groups, audit_masks, audit_responses, remember_domains
from distflow.audit.validation import audit_validation
from distflow.audit.weight_versions import audit_versions, audit_weights

REMEMBERED_BEFORE = (rewards.remember_rewards, remember_domains)
"""Keep what the checks of this and of later steps need, in every step, before its checks."""

REMEMBERED_AFTER = (rewards.remember_coefficients,)
"""The same after its checks, which need what was kept of the step before."""

AT_START: tuple[Check, ...] = (audit_data,)
"""Run on the spec, before anything is generated."""

OF_VALIDATION: tuple[Check, ...] = (audit_validation,)
"""Run on each validation."""

BEFORE: tuple[Check, ...] = (
    audit_resume,
    audit_weights,
    audit_log_probs,
    audit_versions,
    audit_sampled_tokens,
    audit_reference,
    updates.audit_backward,
)
"""Run before the step's first update, as they run the models with the weights that scored the step."""

AFTER: tuple[Check, ...] = (
    audit_groups,
    audit_responses,
    audit_masks,
    rewards.audit_reward_functions,
    rewards.audit_dropped,
    rewards.audit_rewards,
    rewards.audit_kl_control,
    audit_correction,
    audit_advantages,
    audit_custom_functions,
    updates.audit_mini_batches,
    audit_loss,
    updates.audit_gradients,
    updates.audit_optimizer,
    audit_metrics,
)
"""Run at the step's end."""

OF_EVERY_STEP: tuple[Check, ...] = (
    replace(updates.audit_mini_batches, run=updates.audit_each_sample_once),
    replace(updates.audit_optimizer, run=updates.audit_learning_rates),
    audit_metrics,
)
"""Cheap enough for every step: mini-batches, learning rates and metrics."""

LOOK_BEFORE: tuple[Check, ...] = (
    audit_weights,
    audit_log_probs,
    audit_versions,
    audit_sampled_tokens,
    audit_reference,
)
"""Run in steps that are not audited before the first update, on one sample of a few groups."""

LOOK_AFTER: tuple[Check, ...] = (
    audit_responses,
    audit_masks,
    rewards.audit_reward_functions,
    rewards.audit_rewards,
    rewards.audit_kl_control,
    audit_correction,
    audit_advantages,
    audit_loss,
    updates.audit_gradients,
    updates.audit_optimizer,
)
"""Run at the end of steps that are not audited, on a few groups and one update of each model."""

AT_RELEASE: tuple[Check, ...] = (audit_curriculum,)
"""Run in every step on its metrics, once the sample queue has added its own."""

CHECKS = (*AT_START, *AFTER[:9], *BEFORE, *AFTER[9:], *OF_VALIDATION, *AT_RELEASE)
"""All checks in the order of a step, for readers."""


def markdown_table() -> str:
    """The table of checks as it stands in `docs/trust.md`."""
    lines = ["| check | what is checked | needs (if missing, the report says so) | limit |", "|---|---|---|---|"]
    lines += [f"| {check.name} | {check.statement} | {check.needs} | {check.limit} |" for check in CHECKS]
    return "\n".join(lines) + "\n"
