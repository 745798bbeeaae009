"""Keys of `async`."""

from dataclasses import dataclass

from distflow.config.keys.declare import key


@dataclass(frozen=True)
class AsyncConfig:
    """How far rollout may run ahead of training."""

    max_staleness: int = key(
        0, "maximum staleness of a sample in steps; 0 is synchronous", minimum=0, taken_by="rl"
    )
    max_concurrent_rollouts: int | None = key(
        None,
        "maximum prompt groups in flight; null is max_staleness + 1 steps of them",
        minimum=1,
        taken_by="rl",
    )
