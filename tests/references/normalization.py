"""(x − mean) / (std + ε), each over its own level: AReaL's `NormConfig`, ROLL's running moments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.references import numbers


@dataclass(frozen=True)
class Value:
    """A number that counts, of a sample with a score."""

    number: float
    group: object
    """Values with the same one are normalised together at the level group."""
    num_samples: int
    """Samples of the group with a score, those without a value included."""


def pool_of(own: Value, values: Sequence[Value], level: str) -> list[Value]:
    if level == "batch":
        return list(values)
    return [other for other in values if other.group == own.group]


def above_middle(
    own: Value,
    values: Sequence[Value],
    so_far: Sequence[float],
    level: str | None,
    leave_one_out: bool,
) -> float:
    """x − mean. so_far: all rewards of the run, these included."""
    if level is None:
        return own.number
    if level == "running":
        return numbers.above_mean(own.number, so_far)

    pool = [other.number for other in pool_of(own, values, level)]
    above = numbers.above_mean(own.number, pool)
    if not leave_one_out:
        return above
    if level == "group" and own.num_samples == 1:
        return 0.0
    if len(pool) == 1:
        return own.number

    return above * len(pool) / (len(pool) - 1)


def normalise(
    values: Sequence[Value],
    so_far: Sequence[float] = (),
    mean_level: str | None = None,
    mean_leave1out: bool = False,
    std_level: str | None = None,
    std_unbiased: bool = True,
    eps: float = 1e-5,
) -> list[float]:
    """The deviation is that of the differences to the mean that was subtracted."""
    centred = []
    for own in values:
        above = above_middle(own, values, so_far, mean_level, mean_leave1out)
        centred.append(replace(own, number=above))

    found = []
    for own in centred:
        scale = 1.0
        if std_level == "running":
            scale = running_std(so_far, std_unbiased) + eps
        elif std_level is not None:
            pool = pool_of(own, centred, std_level)
            freedom = len(pool) - std_unbiased
            deviation = 1.0
            is_alone = std_level == "group" and own.num_samples == 1
            if freedom > 0 and not (std_unbiased and is_alone):
                deviation = math.sqrt(math.fsum(v.number**2 for v in pool) / freedom)
            scale = deviation + eps

        found.append(own.number / scale)

    return found


def running_std(so_far: Sequence[float], is_unbiased: bool) -> float:
    freedom = len(so_far) - is_unbiased
    return math.sqrt(numbers.variance(so_far, freedom)) if freedom > 0 else 1.0
