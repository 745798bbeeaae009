"""The auditor's checks, in the order in which they are made, and their table in `docs/trust.md`."""

from dataclasses import replace

from distflow.audit.advantages import CHECK as ADVANTAGES
from distflow.audit.check import Check
from distflow.audit.custom_functions import CHECK as USER_CODE
from distflow.audit.gradients import BACKWARD, GRADIENTS
from distflow.audit.groups_and_masks import GROUPS, MASKS
from distflow.audit.kl_and_correction import CORRECTION, KL_CONTROL
from distflow.audit.log_probs import CHECK as LOG_PROBS
from distflow.audit.log_probs import REFERENCE
from distflow.audit.loss import CHECK as LOSS
from distflow.audit.mini_batches import CHECK as MINIBATCHES
from distflow.audit.mini_batches import taken_once
from distflow.audit.optimizer import CHECK as OPTIMIZER
from distflow.audit.optimizer import right_rates
from distflow.audit.responses import CHECK as ANSWERS
from distflow.audit.reward_functions import CHECK as VERDICTS
from distflow.audit.reward_sum import CHECK as REWARDS
from distflow.audit.sampled_tokens import CHECK as DRAWS
from distflow.audit.weight_versions import VERSIONS, WEIGHTS

BEFORE: tuple[Check, ...] = (WEIGHTS, LOG_PROBS, VERSIONS, DRAWS, REFERENCE, BACKWARD)
"""They run the models, as they were when the step was scored: before its first update."""

AFTER: tuple[Check, ...] = (
    GROUPS,
    ANSWERS,
    MASKS,
    VERDICTS,
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
"""At the step's end."""

ON_ARRIVAL: tuple[Check, ...] = (WEIGHTS,)
"""In steps that are not audited, while that is affordable: before the policy is scored."""

OF_EVERY_STEP: tuple[Check, ...] = (replace(MINIBATCHES, prove=taken_once), replace(OPTIMIZER, prove=right_rates))
"""What is cheap enough to be looked at in every step: mini-batches and learning rates."""

OF_A_FEW_GROUPS: tuple[Check, ...] = (MASKS, REWARDS, CORRECTION, ADVANTAGES)
"""The same, of a few groups of the step."""

CHECKS = (*AFTER[:8], *BEFORE, *AFTER[8:])
"""In the order of a step, for people."""


def markdown_table() -> str:
    """The table of checks as it stands in `docs/trust.md`."""
    lines = ["| check | what is proven | needs; without it the report says so | limit |", "|---|---|---|---|"]
    lines += [f"| {check.name} | {check.claim} | {check.needs} | {check.limit} |" for check in CHECKS]
    return "\n".join(lines) + "\n"
