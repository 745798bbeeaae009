"""The pairs that must be equal, each a row of the table."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from distflow.runtime.ray_entry import NEEDED, is_installed, own_ray
from distflow.selftest.figures import Differences, Figures, differences
from distflow.selftest.recorded import Recorded
from distflow.selftest.runs import Lab

TOLERANCE = 5e-6
"""For what adds up in another order: the reference loop, whose figures may be those of another processor, and several
workers. With the vector instructions of several kinds of processors at most 1.2e-6 was found."""

_MOST_WORKERS = 2


Run = Callable[[], Figures]


@dataclass(frozen=True)
class Pair:
    """Two runs that must have the same figures, to `limit`."""

    name: str
    limit: float
    one: Run
    other: Run


@dataclass(frozen=True)
class Row:
    """A pair that was compared. found: None where it could not be, and `fault` says why. left_out: why nobody tried."""

    program: str
    pair: str
    num_steps: int
    limit: float
    found: Differences | None
    fault: str = ""
    left_out: str = ""

    @property
    def ok(self) -> bool:
        return self.found is not None and self.found.within(self.limit)


def compare_all(recorded: dict[str, Recorded], folder: Path) -> Iterator[Row]:
    """A row as soon as its pair is compared. folder: where the runs go, PROGRAM/RUN."""
    with ExitStack() as stack:
        start_ray = functools.cache(lambda: stack.enter_context(own_ray(folder, _MOST_WORKERS)))
        for program, found in recorded.items():
            lab = Lab.of(folder / program, program, found)
            sync = functools.cache(lab.sync)
            yield from (compare(lab, pair) for pair in of_paths(lab, found.figures, sync))
            over_ray = compare if is_installed() else leave_out
            yield from (over_ray(lab, pair) for pair in of_workers(lab, sync, start_ray))


def of_paths(lab: Lab, reference: Figures, sync: Run) -> list[Pair]:
    """Of one process. sync: a synchronous run."""
    behind = _some_step(lab)
    killed = functools.partial(lab.killed, behind)
    return [
        Pair("reference loop = synchronous, on its answers", TOLERANCE, lambda: reference, lab.replayed),
        Pair("synchronous = asynchronous path, staleness 0", 0.0, sync, lab.asynchronous),
        Pair(f"synchronous = killed behind step {behind}, resumed", 0.0, sync, killed),
    ]


def of_workers(lab: Lab, sync: Run, start_ray: Callable[[], object]) -> list[Pair]:
    """Over Ray, which `start_ray` starts once."""

    def on(num_workers: int) -> Figures:
        start_ray()
        return lab.workers(num_workers)

    def resharded() -> Figures:
        start_ray()
        return lab.resharded(saved_at)

    saved_at = _some_step(lab)
    return [
        Pair("synchronous = 1 worker", 0.0, sync, functools.partial(on, 1)),
        Pair("synchronous = 2 workers", TOLERANCE, sync, functools.partial(on, 2)),
        Pair(f"synchronous = 2 shards to step {saved_at}, then 1", TOLERANCE, sync, resharded),
    ]


def compare(lab: Lab, pair: Pair) -> Row:
    """Run both."""
    row = functools.partial(Row, lab.preset, pair.name, len(lab.prompts), pair.limit)
    try:
        return row(differences(pair.one(), pair.other()))
    except Exception as err:  # the edge of a pair: whatever stops its runs is what it has to tell
        return row(None, f"{type(err).__name__}: {err}")


def leave_out(lab: Lab, pair: Pair) -> Row:
    """Run neither."""
    why = f"Ray is not installed: it {NEEDED}"
    return Row(lab.preset, pair.name, len(lab.prompts), pair.limit, None, left_out=why)


def _some_step(lab: Lab) -> int:
    """Steps are left to be killed in."""
    return random.randint(1, len(lab.prompts) - 4)
