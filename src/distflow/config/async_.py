"""Keys of `async`: how far generation may run ahead of training."""

from dataclasses import dataclass

from distflow.config.keys import key


@dataclass(frozen=True)
class AsyncConfig:
    """The experience edge."""

    max_staleness: int = key(0, "steps that a sample's weights may be behind; 0 is synchronous", minimum=0)
    max_concurrent_rollouts: int | None = key(
        None, "prompt groups in flight at once; null is max_staleness + 1 steps of them", minimum=1
    )
