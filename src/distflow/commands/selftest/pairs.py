"""The pairs of runs that `distflow selftest` compares."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from distflow.cluster.ray_launcher import NEEDED, is_installed, own_ray
from distflow.commands.selftest.runs import PRESET_KEYS, Figures, Lab, differences
from distflow.errors import RayNotStarted
from distflow.rollout.conformance import Finding

OK = "ok"
FAILED = "failed"
LEFT_OUT = "left out"

TOLERANCE = 5e-6
"""For several workers, which add in another order. Across the vector instructions of several kinds
of processors, the largest difference found is 1.2e-6."""
_MOST_WORKERS = 2

Run = Callable[[], Figures]


@dataclass(frozen=True)
class Pair:
    """A run that must have the figures of the synchronous one."""

    name: str
    limit: float
    """Of each difference."""
    run: Run
    needs_ray: bool = False


def compare_all(folder: Path) -> Iterator[Finding]:
    """Yields a finding as soon as its pair is compared. folder: for the runs, PIPELINE/RUN."""
    with ExitStack() as stack:
        start_ray = cache(lambda: stack.enter_context(own_ray(folder, _MOST_WORKERS)))
        for preset in PRESET_KEYS:
            lab = Lab.of(folder / preset, preset)
            sync = cache(lab.sync)

            for pair in pairs_of(lab, start_ray):
                name = f"{preset}, {pair.name}"
                if pair.needs_ray and not is_installed():
                    yield Finding(name, LEFT_OUT, f"Ray is not installed: it {NEEDED}")
                else:
                    yield compare(name, sync, pair)


def pairs_of(lab: Lab, start_ray: Callable[[], object]) -> list[Pair]:
    """start_ray: called before each run over Ray."""
    # steps must follow, in which the run can be killed
    step = random.randint(1, lab.num_steps - 4)

    def over_ray(run: Callable[[int], Figures], number: int) -> Figures:
        start_ray()
        return run(number)

    def of_ray(name: str, limit: float, run: Callable[[int], Figures], number: int) -> Pair:
        return Pair(name, limit, partial(over_ray, run, number), needs_ray=True)

    return [
        Pair("asynchronous path, staleness 0", 0.0, lab.asynchronous),
        Pair(f"killed after step {step}, resumed", 0.0, partial(lab.killed, step)),
        of_ray("1 worker over Ray", 0.0, lab.workers, 1),
        of_ray("2 workers over Ray", TOLERANCE, lab.workers, 2),
        of_ray(f"2 shards to step {step}, then 1", TOLERANCE, lab.resharded, step),
    ]


def compare(name: str, expected: Run, pair: Pair) -> Finding:
    """Run both, and compare. On a machine that is too busy to start Ray, nothing was compared."""
    try:
        found = differences(expected(), pair.run())
    except RayNotStarted as err:
        return Finding(name, LEFT_OUT, f"{err} Run it again when the machine is less busy")
    except Exception as err:  # whatever ends a run is the result of the pair
        return Finding(name, FAILED, f"{type(err).__name__}: {err}")

    return Finding(name, OK if within(found, pair.limit) else FAILED, shown(found, pair.limit))


def within(found: Mapping[str, float], limit: float) -> bool:
    """Whether all differences are within the limit; False if one is NaN."""
    return all(value <= limit for value in found.values())


def shown(found: Mapping[str, float], limit: float) -> str:
    values = ", ".join(f"{name} {value:.0e}" for name, value in found.items())
    return f"largest differences: {values} (limit {limit:.0e})"
