"""Keys of `trust`."""

from dataclasses import dataclass

from distflow.config.keys.declare import BY_NAME, key


@dataclass(frozen=True)
class TrustConfig:
    """Checks during a run."""

    canary_freq: int = key(
        1,
        "weight syncs between comparisons of engine and trainer on fixed prompts; 0 is never",
        minimum=0,
        taken_by=BY_NAME,
    )
    check_freq: int = key(
        5,
        (
            "of so many steps one is checked whole, at a random place, if time allows; besides the "
            "first, the last and those after 2^n steps; 1: every step, 0: none"
        ),
        minimum=0,
    )
    on_mismatch: str = key(
        "warn",
        "if rollout and trainer log-probs diverge: stop, or only warn",
        choices=("stop", "warn"),
        taken_by="rollout",
    )
    max_skipped_updates: int = key(5, "consecutive non-finite updates that stop the run", minimum=1)
    unmoved_after: int = key(20, "updates after which an unchanged weight is reported", minimum=1)
    check_rewards: bool = key(
        True,
        (
            "test reward functions before the start on good and bad responses, and try your own "
            "workflow once"
        ),
        taken_by=("reward_fn", "run_workflow"),
    )
