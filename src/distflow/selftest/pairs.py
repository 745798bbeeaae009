"""The pairs that must be equal, each a row of the table."""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distflow.selftest.figures import Differences, Figures, differences
from distflow.selftest.recorded import Recorded
from distflow.selftest.runs import Lab

TOLERANCE = 5e-6
"""For the reference loop: it adds up in another order, and its figures may be those of another processor. With the
vector instructions of several kinds of them at most 1.2e-6 was found."""


@dataclass(frozen=True)
class Row:
    """A pair that was compared. found: None where it could not be, and `fault` says why."""

    program: str
    pair: str
    num_steps: int
    limit: float
    found: Differences | None
    fault: str = ""

    @property
    def ok(self) -> bool:
        return self.found is not None and self.found.within(self.limit)


def compare_all(recorded: dict[str, Recorded], folder: Path) -> Iterator[Row]:
    """A row as soon as its pair is compared. folder: where the runs go, PROGRAM/RUN."""
    for program, found in recorded.items():
        yield from _compare(Lab.of(folder / program, program, found), found.figures)


def _compare(lab: Lab, reference: Figures) -> Iterator[Row]:
    num_steps, sync = len(lab.prompts), functools.cache(lab.sync)
    killed_after = random.randint(1, num_steps - 4)  # steps are left to be killed in
    killed = functools.partial(lab.killed, killed_after)
    row = functools.partial(_row, lab.preset, num_steps)
    yield row("reference loop = synchronous, on its answers", TOLERANCE, lambda: reference, lab.replayed)
    yield row("synchronous = asynchronous path, staleness 0", 0.0, sync, lab.asynchronous)
    yield row(f"synchronous = killed behind step {killed_after}, resumed", 0.0, sync, killed)


def _row(
    program: str, num_steps: int, pair: str, limit: float, one: Callable[[], Figures], other: Callable[[], Figures]
) -> Row:
    try:
        return Row(program, pair, num_steps, limit, differences(one(), other()))
    except Exception as err:  # the edge of a pair: whatever stops its runs is what it has to tell
        return Row(program, pair, num_steps, limit, None, f"{type(err).__name__}: {err}")
