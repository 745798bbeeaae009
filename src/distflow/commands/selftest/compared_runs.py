"""The pairs of runs that `distflow selftest` compares, and the table that it prints, row by row."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from distflow.cluster.ray_launcher import NEEDED, is_installed, own_ray
from distflow.commands.selftest.collectives import check_collectives
from distflow.commands.selftest.runs import (
    RECORDED,
    TOKENIZER,
    Differences,
    Figures,
    Lab,
    Recorded,
    differences,
    read_recorded,
    write_models,
)
from distflow.config import Config
from distflow.errors import RayNotStarted
from distflow.launch.devices import accelerator
from distflow.launch.without_run import device_checks
from distflow.launch.without_run.device_checks import (
    EXACT,
    FAILED,
    OK,
    Check,
    Finding,
    Result,
    Subject,
    try_check,
)

TOLERANCE = 5e-6
"""For sums in another order: the reference loop, which may have run on another processor, and
several workers. Across the vector instructions of several kinds of processors, the largest
difference found is 1.2e-6."""

_MOST_WORKERS = 2
_LINE = "{:<7}{:<45}{:>5}{:>9}{:>11}{:>10}{:>9}{:>8}  {}"

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
    """A compared pair. found: None if it could not be compared. fault: why. left_out: why it was
    skipped."""

    pipeline: str
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
    """Yields a row as soon as its pair is compared. folder: for the runs, PIPELINE/RUN."""
    with ExitStack() as stack:
        start_ray = functools.cache(lambda: stack.enter_context(own_ray(folder, _MOST_WORKERS)))
        for pipeline, found in recorded.items():
            lab = Lab.of(folder / pipeline, pipeline, found)
            sync = functools.cache(lab.sync)
            yield from (compare(lab, pair) for pair in of_paths(lab, found.figures, sync))
            over_ray = compare if is_installed() else leave_out
            yield from (over_ray(lab, pair) for pair in of_workers(lab, sync, start_ray))


def of_paths(lab: Lab, reference: Figures, sync: Run) -> list[Pair]:
    """Pairs of runs of one process. sync: a synchronous run."""
    step = _some_step(lab)
    killed = functools.partial(lab.killed, step)
    return [
        Pair(
            "reference loop = synchronous, on its responses",
            TOLERANCE,
            lambda: reference,
            lab.replayed,
        ),
        Pair("synchronous = asynchronous path, staleness 0", 0.0, sync, lab.asynchronous),
        Pair(f"synchronous = killed after step {step}, resumed", 0.0, sync, killed),
    ]


def of_workers(lab: Lab, sync: Run, start_ray: Callable[[], object]) -> list[Pair]:
    """Pairs of runs over Ray, which `start_ray` starts once."""

    def on_ray(run: Callable[[int], Figures], number: int) -> Figures:
        start_ray()
        return run(number)

    step = _some_step(lab)
    one = functools.partial(on_ray, lab.workers, 1)
    two = functools.partial(on_ray, lab.workers, 2)
    resharded = functools.partial(on_ray, lab.resharded, step)
    return [
        Pair("synchronous = 1 worker", 0.0, sync, one),
        Pair("synchronous = 2 workers", TOLERANCE, sync, two),
        Pair(f"synchronous = 2 shards to step {step}, then 1", TOLERANCE, sync, resharded),
    ]


def compare(lab: Lab, pair: Pair) -> Row:
    """Run both, and compare. On a machine that is too busy to start Ray, nothing was compared."""
    row = functools.partial(Row, lab.preset, pair.name, len(lab.prompts), pair.limit)
    try:
        return row(differences(pair.one(), pair.other()))
    except RayNotStarted as err:
        return row(None, left_out=f"{err} Run the selftest again when the machine is less busy")
    except Exception as err:  # whatever ends a run is the result of the pair
        return row(None, f"{type(err).__name__}: {err}")


def leave_out(lab: Lab, pair: Pair) -> Row:
    why = f"Ray is not installed: it {NEEDED}"
    return Row(lab.preset, pair.name, len(lab.prompts), pair.limit, None, left_out=why)


def _some_step(lab: Lab) -> int:
    """A random step, followed by steps in which the run can be killed."""
    return random.randint(1, len(lab.prompts) - 4)


def head() -> str:
    names = ("steps", "loss", "grad norm", "log-prob", "weight", "limit")
    return _LINE.format("", "largest differences", *names, "").rstrip()


def line(row: Row) -> str:
    found = map(_short, astuple(row.found)) if row.found else ("-",) * 4
    result = "left out" if row.left_out else "ok" if row.ok else "FAILED"
    return _LINE.format(row.pipeline, row.pair, row.num_steps, *found, _short(row.limit), result)


def left_out(rows: Sequence[Row]) -> Iterator[str]:
    """Which pairs were skipped, and why."""
    for why in dict.fromkeys(row.left_out for row in rows if row.left_out):
        count = sum(row.left_out == why for row in rows)
        yield f"{count} of {len(rows)} pairs were left out and are not verified. {why}"


def advice(failed: Sequence[Row], folder: Path) -> Iterator[str]:
    """The failed pairs, and what to do about them."""
    for row in failed:
        yield (
            f"FAILED: {row.pipeline}, {row.pair}: "
            f"{row.fault or 'they differ by more than the limit'}"
        )
    yield (
        f"the runs are kept: {folder}/PIPELINE/RUN, with report.html in each, and "
        "PIPELINE/runs.log and killed.log"
    )
    yield (
        "Do not trust results of this machine before this is explained: run `distflow doctor`, "
        "reinstall distflow and "
        "the torch that it requires, and if the failure persists, report it with this table and "
        "that folder"
    )


def _short(number: float) -> str:
    return f"{number:.0e}" if number else "0"


_STEPS: Final = 2


def check_all(config: Config, folder: Path) -> Iterator[Finding]:
    """Yields each finding once made; only the first if there is no device to check. folder: an
    empty one."""
    found = device_checks.find_device(config.trainer.device)
    yield found
    kind = accelerator()
    if found.outcome == OK and kind is not None:
        write_models(folder)
        subject = Subject(config, torch.device(kind), folder, TOKENIZER)
        yield from (try_check(name, check, subject) for name, check in CHECKS.items())


def _grpo(subject: Subject) -> Result:
    """Rollout, reward, advantages, updates and a checkpoint of the selftest's run, on both
    devices."""
    recorded = read_recorded(RECORDED)["grpo"]
    first = replace(recorded.figures, steps=recorded.figures.steps[:_STEPS])
    lab = Lab.of(
        subject.folder / "grpo",
        "grpo",
        replace(recorded, prompts=recorded.prompts[:_STEPS], figures=first),
    )
    on_cpu, on_device = (partial(lab.on_device, device) for device in ("cpu", subject.device.type))
    row = compare(lab, Pair(f"CPU = {subject.device.type}", EXACT, on_cpu, on_device))
    if row.found is None:
        return FAILED, row.fault
    names = ("loss", "gradient", "log-probs", "weights")
    found = ", ".join(
        f"{name} {value:.0e}" for name, value in zip(names, astuple(row.found), strict=True)
    )
    return (
        OK if row.ok else FAILED,
        f"{_STEPS} steps differ from the CPU's by: {found} (limit {EXACT:.0e})",
    )


CHECKS: Final = {
    **device_checks.CHECKS,
    "collectives": Check(
        lambda subject: (OK, check_collectives(subject.device.type, subject.folder)),
        "train on one device until they work; NCCL_DEBUG=INFO says more",
    ),
    "GRPO steps": Check(_grpo, "do not train on this device"),
}
