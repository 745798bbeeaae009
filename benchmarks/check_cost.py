"""What a run's checks cost: the share of processor time that the checked steps, and the checks of
every step, take.

    python -m benchmarks.check_cost [--work tiny --steps 300] [--by-check]
    python -m benchmarks.check_cost --work quickstart      # after `make quickstart`, whose model it
    trains

Processor time of the whole process is read around each call of the run's checks, and within the
hooks with which they watch an update; it hardly depends on what else the machine does, but counts
threads of torch that wait in a loop (`--wall` reads the clock). The rest of the run is from the
beginning of its training loop. Reward functions run in other processes, whose time is not counted,
so that the share is rather too large. `tiny` is a random decoder (32 wide, 2 layers) with steps of
some 50 ms.
"""

import argparse
import contextlib
import gc
import io
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from distflow.checks import all_checks
from distflow.checks.canary import Canary
from distflow.checks.checker import Checker
from distflow.checks.invariants import Invariants
from distflow.checks.update_records import MicroRecord, Stripe, UpdateWatch
from distflow.config import load_config
from distflow.launch.make_spec import make_spec
from distflow.launch.one_process_launcher import launch_local
from tests.e2e.runs import Playground

HOOKS = {
    Checker: (
        "loop_begins step_taken node_finished before_update after_update step_trained "
        "validated part_validated state_saved"
    ),
    Invariants: "step_taken updated step_trained",
    Canary: "compare",
    UpdateWatch: "_before_step",
    Stripe: "contribute",
    MicroRecord: "add_gradient",
}
LISTS = [
    name
    for name, found in vars(all_checks).items()
    if name.isupper() and name != "CHECKS" and found
]
RANGES = (20, 40, 100, 300, 1_000, 10_000)


class Costs:
    """Seconds by step and part; parts within others count once. clock: which seconds."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.by_step: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.by_check: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self.ends: list[float] = []
        self.began = 0.0
        self._inside = False

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        if self._inside:
            yield
            return

        self._inside, began = True, self.clock()
        try:
            yield
        finally:
            self._inside = False
            self.by_step[len(self.ends)][part] += self.clock() - began

    def wrap(self, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.timed(part):
                return original(*arguments, **named)

        return timed

    def wrap_check(self, check: Any) -> Any:
        def timed(seen: Any) -> Any:
            began = self.clock()
            try:
                return check.run(seen)
            finally:
                entry = self.by_check[f"{check.name} ({getattr(check.run, '__name__', check.run)})"]
                entry[0] += 1
                entry[1] += self.clock() - began

        return replace(check, run=timed) if hasattr(check, "run") else check

    def install(self, by_check: bool) -> None:
        for owner, names in HOOKS.items():
            part = "checks" if owner in (Invariants, Canary) else "checked steps"
            for name in names.split():
                setattr(owner, name, self.wrap(part, getattr(owner, name)))

        begins = Checker.loop_begins
        trained = Checker.step_trained

        def loop_begins(checker: Checker) -> None:
            self.began = self.clock()
            begins(checker)

        def step_trained(checker: Checker, *more: Any) -> dict[str, float]:
            found = trained(checker, *more)
            self.ends.append(self.clock())
            return found

        Checker.loop_begins = loop_begins  # type: ignore[method-assign]
        Checker.step_trained = step_trained  # type: ignore[method-assign]
        for name in LISTS if by_check else ():
            setattr(all_checks, name, tuple(map(self.wrap_check, getattr(all_checks, name))))

    def print(self) -> None:
        print(
            "| steps | ms a step | checked steps | every step | together |\n|---|---|---|---|---|"
        )

        first = 0
        for end in (*(each for each in RANGES if each < len(self.ends)), len(self.ends)):
            self._row(first, end)
            first = end

        if len(self.ends) > RANGES[0]:
            self._row(0, len(self.ends))
        for name, (calls, seconds) in sorted(self.by_check.items(), key=lambda each: -each[1][1]):
            print(f"  {name}: {calls} calls, {1e3 * seconds / calls:.2f} ms each, {seconds:.3f} s")

    def _row(self, first: int, end: int) -> None:
        run_s = self.ends[end - 1] - (self.ends[first - 1] if first else self.began)
        parts = [
            sum(self.by_step[step][part] for step in range(first, end))
            for part in ("checked steps", "checks")
        ]
        shares = " | ".join(f"{seconds / run_s:.2%}" for seconds in (*parts, sum(parts)))
        print(f"| {first + 1} to {end} | {1e3 * run_s / (end - first):.0f} | {shares} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", choices=("tiny", "quickstart"), default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--by-check", action="store_true")
    parser.add_argument(
        "--wall", action="store_true", help="time by the clock, on a machine that does nothing else"
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    gc.freeze()  # as `distflow train` does
    costs = Costs(time.perf_counter if options.wall else time.process_time)
    costs.install(options.by_check)
    steps = f"trainer.total_training_steps={options.steps}"

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if options.work == "tiny":
            two_by_two = (
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.actor.ppo_epochs=2",
            )
            Playground(Path(folder)).run(
                "grpo", steps, "trainer.logger=[]", *two_by_two, *options.overrides
            )
        else:
            own = (
                f"trainer.default_local_dir={folder}/run",
                "trainer.test_freq=-1",
                "trainer.logger=[]",
            )
            loaded = load_config("quickstart_grpo", [steps, *own, *options.overrides])
            launch_local(make_spec(loaded, say=lambda line: None))

    costs.print()


if __name__ == "__main__":
    main()
