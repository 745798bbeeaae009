"""What a run measured, in place of what a plan can only estimate: how much longer than on the
roofline the parts of a step take, the times of rewards, the rest of a step, and the memory of a
process beside its models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log1p
from statistics import fmean

PARTS = ("generate", "forward", "update", "sync")
"""Whose seconds a roofline estimates. forward: log-probs and values."""


@dataclass(frozen=True)
class Rates:
    """generate, forward, update, sync: measured seconds for each planned one. scores: seconds of
    the scoring of groups, of equal shares, ascending. rest: seconds of a step, for each sample,
    outside of these parts. libraries: bytes of a process without its models; None as usual. spread:
    the quartiles of a step's seconds over their median. source: the run; empty if nothing was
    measured."""

    generate: float = 1.0
    forward: float = 1.0
    update: float = 1.0
    sync: float = 1.0
    scores: tuple[float, ...] = ()
    rest: float = 0.0
    libraries: float | None = None
    spread: tuple[float, float] = (1.0, 1.0)
    source: str = ""

    @property
    def score(self) -> float:
        """Mean seconds of a group's scoring."""
        return fmean(self.scores) if self.scores else 0.0

    def rewards(self, groups: int, workers: int, late: float) -> float:
        """Seconds of the scoring that remains when a batch has its last token. late: share of the
        groups that end with it; the others were scored before."""
        return self.score * max(1, ceil(groups * late / workers)) if self.scores else 0.0

    def sentence(self) -> str:
        parts = ", ".join(f"{part} {getattr(self, part):.3g}" for part in PARTS)
        scored = f"; the scoring of a group takes {self.score:.3g} s" if self.scores else ""
        return (
            f"seconds for each of the roofline's: {parts}; {self.rest * 1e3:.3g} ms a sample for "
            f"the rest{scored}"
        )


@dataclass(frozen=True)
class MeasuredSteps:
    """Medians over the steps of a run. seconds: of `PARTS`, and of `rest`. scores, spread: see
    `Rates`. samples: of a step. peak: bytes of the fullest process, None if unknown."""

    seconds: Mapping[str, float]
    scores: tuple[float, ...]
    samples: int
    spread: tuple[float, float] = (1.0, 1.0)
    peak: float | None = None


def fit(
    measured: MeasuredSteps,
    planned: Mapping[str, float],
    peak: float,
    libraries: float,
    source: str,
) -> Rates:
    """The rates with which a plan of that run gives what the run measured. planned: seconds of
    `PARTS`, and of `rewards` that are left after the last token. peak, libraries: bytes that the
    plan has for the fullest process, and for its libraries among them."""
    factors = {
        part: measured.seconds[part] / planned[part]
        for part in PARTS
        if planned.get(part) and measured.seconds.get(part)
    }
    passes = {part: rate for part, rate in factors.items() if part in ("forward", "update")}
    if len(passes) == 1:  # they run the same kernels
        factors |= dict.fromkeys(("forward", "update"), *passes.values())
    rest = max(0.0, measured.seconds.get("rest", 0.0) - planned.get("rewards", 0.0)) / max(
        1, measured.samples
    )
    beside = None if measured.peak is None else max(0.0, libraries + measured.peak - peak)
    return Rates(
        **factors,
        scores=measured.scores,
        rest=rest,
        libraries=beside,
        spread=measured.spread,
        source=source,
    )


def lengths_under(limit: int, lengths: Sequence[float], old_limit: int) -> tuple[float, ...]:
    """Measured lengths of responses as another limit would have them, ascending. Longer ones are
    cut. Those that the old limit cut continue, and end at the rate at which responses ended below
    it."""
    ended = [length for length in lengths if length < old_limit]
    number = len(lengths) - len(ended)
    rate = len(ended) / sum(lengths)
    longer = (-log1p(-(place + 0.5) / number) / rate if rate else limit for place in range(number))
    return tuple(
        sorted(
            min(float(limit), length) for length in (*ended, *(old_limit + more for more in longer))
        )
    )


def quantiles(values: Sequence[float], number: int) -> tuple[float, ...]:
    """So many values of equal shares, ascending; all values if there are fewer."""
    ordered = sorted(values)
    if len(ordered) <= number:
        return tuple(ordered)
    return tuple(ordered[int((place + 0.5) * len(ordered) / number)] for place in range(number))
