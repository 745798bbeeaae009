"""Lists the checks of a checked step in the order in which they run, and generates their table in
`docs/trust.md`."""

from distflow.checks.advantages import check_advantages
from distflow.checks.check import Check
from distflow.checks.data_rows import check_data
from distflow.checks.draws import check_draws
from distflow.checks.engine_weights import check_weights
from distflow.checks.episodes import check_episodes
from distflow.checks.gradients import check_gradients
from distflow.checks.groups import check_groups
from distflow.checks.log_probs import check_log_probs, check_reference
from distflow.checks.losses import check_losses
from distflow.checks.masks import check_masks
from distflow.checks.mini_batches import check_mini_batches
from distflow.checks.optimizers import check_optimizers
from distflow.checks.responses import check_responses
from distflow.checks.resume import check_resume
from distflow.checks.rewards import check_reward_results, check_rewards
from distflow.checks.turns import check_turns
from distflow.checks.validation import check_validation
from distflow.checks.versions import check_versions

AT_START: tuple[Check, ...] = (check_data,)
"""Run on the `CheckedRun`, before anything is generated."""

BEFORE: tuple[Check, ...] = (
    check_resume,
    check_turns,
    check_weights,
    check_log_probs,
    check_versions,
    check_draws,
    check_reference,
)
"""Run before the step's first update, since they run the models with the weights that scored the
step."""

AFTER: tuple[Check, ...] = (
    check_groups,
    check_responses,
    check_masks,
    check_episodes,
    check_reward_results,
    check_rewards,
    check_mini_batches,
    check_gradients,
    check_losses,
    check_optimizers,
)
"""Run at the step's end."""

OF_VALIDATION: tuple[Check, ...] = (check_validation,)
"""Run on each validation."""

OF_A_GROUP: tuple[Check, ...] = (check_responses, check_turns, check_episodes, check_reward_results)
"""Run on finished groups of workers that only generate; no reward function is called again."""

CHECKS = (*AT_START, *BEFORE, *AFTER[:6], check_advantages, *AFTER[6:], *OF_VALIDATION)
"""All checks, for documentation."""
