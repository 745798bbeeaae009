"""Learning-rate schedules: pure functions from the number of optimizer steps taken to a factor of the rate."""

import math
from collections.abc import Callable

from distflow.config.errors import UserError

Schedule = Callable[[int], float]

SCHEDULES = ("constant", "constant_with_warmup", "linear_with_warmup", "cosine_with_warmup")


def make_schedule(
    name: str,
    *,
    total_steps: int,
    warmup_ratio: float = 0.0,
    warmup_steps: int = -1,
    min_lr_ratio: float = 0.0,
) -> Schedule:
    """step → factor, for the step that is about to be taken (from 0).

    Warm-up rises linearly from 0: factor step / warmup over `warmup_steps` steps, or `warmup_ratio` of `total_steps`
    where that is negative (rounded down). Then 1, or falling to `min_lr_ratio` at `total_steps`, linearly or by half a
    cosine, and staying there. "constant" has no warm-up.
    Raises UserError for an unknown name.
    """
    if name not in SCHEDULES:
        raise UserError(f"unknown scheduler '{name}'; there are: {', '.join(SCHEDULES)}")
    if name == "constant":
        return lambda step: 1.0
    warmup = warmup_steps if warmup_steps >= 0 else int(warmup_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if name == "constant_with_warmup":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        falling = 1.0 - progress if name == "linear_with_warmup" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return min_lr_ratio + (1.0 - min_lr_ratio) * falling

    return factor
