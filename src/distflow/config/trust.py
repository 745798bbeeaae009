"""Keys of `trust`: the checks that run beside the training."""

from dataclasses import dataclass

from distflow.config.keys import key


@dataclass(frozen=True)
class TrustConfig:
    """What is checked while a run runs."""

    canary_freq: int = key(
        1, "compare engine and trainer on fixed prompts every so many publishes; 0 is never", minimum=0
    )
    audit_freq: int = key(20, "prove a step again every so many steps, and at start and resume; 0 is never", minimum=0)
    on_mismatch: str = key(
        "correct",
        "where rollout and trainer drift apart: weigh each token by their ratio from then on, stop, or only warn",
        choices=("correct", "stop", "warn"),
    )
    max_skipped_updates: int = key(5, "stop after so many updates in a row with a loss that is not finite", minimum=1)
    unmoved_after: int = key(20, "warn of a weight that has not moved after so many updates", minimum=1)
    certify_rewards: bool = key(True, "before the start, see that verifiers accept good answers and refuse bad ones")
