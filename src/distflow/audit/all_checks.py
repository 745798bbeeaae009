"""Lists the auditor's checks in the order in which they run, and makes their table in `docs/trust.md`."""

from dataclasses import replace

from distflow.audit.advantages import CHECK as ADVANTAGES
from distflow.audit.custom_functions import CHECK as USER_CODE
from distflow.audit.gradients import BACKWARD, GRADIENTS
from distflow.audit.groups_and_masks import GROUPS, MASKS
from distflow.audit.kl_and_correction import CORRECTION, KL_CONTROL
from distflow.audit.log_probs import CHECK as LOG_PROBS
from distflow.audit.log_probs import REFERENCE
from distflow.audit.loss import CHECK as LOSS
from distflow.audit.mini_batches import CHECK as MINIBATCHES
from distflow.audit.mini_batches import audit_each_sample_once
from distflow.audit.optimizer import CHECK as OPTIMIZER
from distflow.audit.optimizer import audit_learning_rates
from distflow.audit.recorded_data import Check
from distflow.audit.responses import CHECK as RESPONSES
from distflow.audit.reward_functions import CHECK as REWARD_RESULTS
from distflow.audit.reward_sum import CHECK as REWARDS
from distflow.audit.sampled_tokens import CHECK as DRAWS
from distflow.audit.weight_versions import VERSIONS, WEIGHTS

BEFORE: tuple[Check, ...] = (WEIGHTS, LOG_PROBS, VERSIONS, DRAWS, REFERENCE, BACKWARD)
"""Run before the step's first update, as they run the models with the weights that scored the step."""

AFTER: tuple[Check, ...] = (
    GROUPS,
    RESPONSES,
    MASKS,
    REWARD_RESULTS,
    REWARDS,
    KL_CONTROL,
    CORRECTION,
    ADVANTAGES,
    USER_CODE,
    MINIBATCHES,
    LOSS,
    GRADIENTS,
    OPTIMIZER,
)
"""Run at the step's end."""

ON_ARRIVAL: tuple[Check, ...] = (WEIGHTS,)
"""Run before the policy is scored, in steps that are not audited, while the time budget allows it."""

OF_EVERY_STEP: tuple[Check, ...] = (
    replace(MINIBATCHES, run=audit_each_sample_once),
    replace(OPTIMIZER, run=audit_learning_rates),
)
"""Cheap enough for every step: mini-batches and learning rates."""

OF_A_FEW_GROUPS: tuple[Check, ...] = (MASKS, REWARDS, CORRECTION, ADVANTAGES)
"""Also run in steps that are not audited, on a few groups."""

CHECKS = (*AFTER[:8], *BEFORE, *AFTER[8:])
"""All checks in the order of a step, for readers."""


def markdown_table() -> str:
    """The table of checks as it stands in `docs/trust.md`."""
    lines = ["| check | what is checked | needs (if missing, the report says so) | limit |", "|---|---|---|---|"]
    lines += [f"| {check.name} | {check.statement} | {check.needs} | {check.limit} |" for check in CHECKS]
    return "\n".join(lines) + "\n"
