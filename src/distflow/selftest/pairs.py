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
            yield from compare_paths(lab, found.figures, sync)
            yield from compare_workers(lab, sync, start_ray)


def compare_paths(lab: Lab, reference: Figures, sync: Callable[[], Figures]) -> Iterator[Row]:
    """Of one process. sync: the figures of a synchronous run."""
    killed_behind = _some_step(lab)
    killed = functools.partial(lab.killed, killed_behind)
    row = functools.partial(_row, lab)
    yield row("reference loop = synchronous, on its answers", TOLERANCE, lambda: reference, lab.replayed)
    yield row("synchronous = asynchronous path, staleness 0", 0.0, sync, lab.asynchronous)
    yield row(f"synchronous = killed behind step {killed_behind}, resumed", 0.0, sync, killed)


def compare_workers(lab: Lab, sync: Callable[[], Figures], start_ray: Callable[[], object]) -> Iterator[Row]:
    """Over Ray, where it is installed."""

    def on(num_workers: int) -> Figures:
        start_ray()
        return lab.workers(num_workers)

    def resharded() -> Figures:
        start_ray()
        return lab.resharded(saved_at)

    row, saved_at = functools.partial(_row if is_installed() else _left_out, lab), _some_step(lab)
    yield row("synchronous = 1 worker", 0.0, sync, functools.partial(on, 1))
    yield row("synchronous = 2 workers", TOLERANCE, sync, functools.partial(on, 2))
    yield row(f"synchronous = 2 shards to step {saved_at}, then 1", TOLERANCE, sync, resharded)


def _some_step(lab: Lab) -> int:
    """Steps are left to be killed in."""
    return random.randint(1, len(lab.prompts) - 4)


def _row(lab: Lab, pair: str, limit: float, one: Callable[[], Figures], other: Callable[[], Figures]) -> Row:
    row = functools.partial(Row, lab.preset, pair, len(lab.prompts), limit)
    try:
        return row(differences(one(), other()))
    except Exception as err:  # the edge of a pair: whatever stops its runs is what it has to tell
        return row(None, f"{type(err).__name__}: {err}")


def _left_out(lab: Lab, pair: str, limit: float, *runs: Callable[[], Figures]) -> Row:
    return Row(lab.preset, pair, len(lab.prompts), limit, None, left_out=f"Ray is not installed: it {NEEDED}")
