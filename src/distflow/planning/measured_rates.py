"""What a run measured, in place of what a plan can only estimate."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

PARTS = ("generate", "forward", "update", "sync")
"""Parts of a step whose seconds a roofline estimates. forward: log-probs and values."""


@dataclass(frozen=True)
class Rates:
    generate: float = 1.0
    """Measured seconds for each second of the roofline; so are the next three."""
    forward: float = 1.0
    update: float = 1.0
    sync: float = 1.0
    score: float = 0.0
    """Mean seconds of a group's scoring."""
    rest: float = 0.0
    """Seconds of a step, for each sample, outside of the other parts."""
    libraries: float | None = None
    """Bytes of a process without its models; None as usual."""
    source: str = ""
    """The run; empty if nothing was measured."""

    def rewards(self, groups: int, workers: int, late: float) -> float:
        """Seconds of the scoring that remains when a batch has its last token. late: share of the
        groups that end with it; the others were scored before."""
        return self.score * max(1, ceil(groups * late / workers))

    def sentence(self) -> str:
        parts = ", ".join(f"{part} {getattr(self, part):.3g}" for part in PARTS)
        scored = ""
        if self.score:
            scored = f"; the scoring of a group takes {self.score:.3g} s"

        return (
            f"seconds for each of the roofline's: {parts}; {self.rest * 1e3:.3g} ms a sample for "
            f"the rest{scored}"
        )


@dataclass(frozen=True)
class MeasuredSteps:
    """Medians over the steps of a run."""

    seconds: Mapping[str, float]
    """Of `PARTS`, and of `rest`."""
    score: float
    """As in `Rates`."""
    samples: int
    """Of a step."""
    peak: float | None = None
    """Bytes of the fullest process; None if unknown."""


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
    factors = {}
    for part in PARTS:
        if planned.get(part) and measured.seconds.get(part):
            factors[part] = measured.seconds[part] / planned[part]

    # Both passes run the same kernels, so one that was not measured has the other's rate.
    if "update" in factors:
        factors.setdefault("forward", factors["update"])
    elif "forward" in factors:
        factors["update"] = factors["forward"]

    rest = max(0.0, measured.seconds.get("rest", 0.0) - planned.get("rewards", 0.0))
    beside = None
    if measured.peak is not None:
        beside = max(0.0, libraries + measured.peak - peak)
    return Rates(
        **factors,
        score=measured.score,
        rest=rest / max(1, measured.samples),
        libraries=beside,
        source=source,
    )
