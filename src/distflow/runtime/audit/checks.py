"""The auditor's checks, in the order in which they are made, and their table in `docs/trust.md`."""

from dataclasses import replace

from distflow.runtime.audit.advantages import CHECK as ADVANTAGES
from distflow.runtime.audit.answers import CHECK as ANSWERS
from distflow.runtime.audit.backward import CHECK as BACKWARD
from distflow.runtime.audit.check import Check
from distflow.runtime.audit.correction import CHECK as CORRECTION
from distflow.runtime.audit.draws import CHECK as DRAWS
from distflow.runtime.audit.gradients import CHECK as GRADIENTS
from distflow.runtime.audit.groups import CHECK as GROUPS
from distflow.runtime.audit.kl_control import CHECK as KL_CONTROL
from distflow.runtime.audit.log_probs import CHECK as LOG_PROBS
from distflow.runtime.audit.loss import CHECK as LOSS
from distflow.runtime.audit.masks import CHECK as MASKS
from distflow.runtime.audit.minibatches import CHECK as MINIBATCHES
from distflow.runtime.audit.minibatches import taken_once
from distflow.runtime.audit.optimizer import CHECK as OPTIMIZER
from distflow.runtime.audit.optimizer import right_rates
from distflow.runtime.audit.reference import CHECK as REFERENCE
from distflow.runtime.audit.rewards import CHECK as REWARDS
from distflow.runtime.audit.user_code import CHECK as USER_CODE
from distflow.runtime.audit.verdicts import CHECK as VERDICTS
from distflow.runtime.audit.versions import CHECK as VERSIONS
from distflow.runtime.audit.weights import CHECK as WEIGHTS

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
