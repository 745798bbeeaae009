"""Signals to processes of a real run over Ray, drawn from a seed: which process, which signal,
when; and what must come of it. `python -m tests.cluster.drawn_kills SEED ...` tries many of
them."""

import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.distance import distance
from tests.cluster.leftovers import Held, named
from tests.e2e.cli_runs import CliRun, Left
from tests.e2e.runs import Playground, notes

STEPS = 6
GRPO = (
    "trainer.launcher=ray",
    "actor_rollout_ref.actor.optim.scheduler=constant",
    "trainer.save_freq=1",
)
LAYOUTS = {
    "together": ("grpo", (*GRPO, "trainer.n_gpus_per_node=2")),
    "apart": ("grpo", (*GRPO, "trainer.allocation='embedded[rollout]:d1+torch[actor]:d2'")),
    "stream": (
        "grpo",
        (
            *GRPO,
            "async.max_staleness=1",
            "trainer.allocation='embedded[rollout]:d2+torch[actor]:d1'",
        ),
    ),
    "dp_groups": (
        "ppo",
        (
            *GRPO,
            "critic.optim.scheduler=constant",
            "trainer.allocation='embedded:d1|torch[actor]:d1+torch[critic]:d1'",
        ),
    ),
}
PROCESSES = {
    "worker": "ray::WorkerActor",
    "coordinator": "ray::CoordinatorActor",
    "exchange": "ray::ReshardActor",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
}
RECORDS = 14 * STEPS
"""About as many has the journal of a run."""

NOTICED_WITHIN_S = {signal.SIGKILL: 60.0, signal.SIGTERM: 60.0, signal.SIGSTOP: 180.0}


@dataclass(frozen=True)
class Strike:
    """victim: one of `PROCESSES`, or the driver. records: of the journal, after which it is struck;
    0 is before any, when its process is there. delay_s: still to be waited then."""

    layout: str
    victim: str
    number: signal.Signals
    records: int
    delay_s: float


def draw(seed: int) -> Strike:
    rng = random.Random(seed)
    layout = rng.choice(list(LAYOUTS))
    victims = (
        ["worker"] * 4
        + ["coordinator", "raylet", "gcs", "driver"]
        + ["exchange"] * 2 * (layout == "dp_groups")
    )
    victim = rng.choice(victims)
    number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
    if rng.random() < 0.25:
        return Strike(layout, victim, number, 0, rng.choice([0.0, rng.uniform(0, 8)]))
    return Strike(layout, victim, number, rng.randrange(1, RECORDS), rng.uniform(0, 0.1))


class Missed(Exception):
    """The run was over before its process was struck."""


def strike(
    ground: Playground, name: str, drawn: Strike, rng: random.Random
) -> tuple[CliRun, Held, int, float]:
    preset, keys = LAYOUTS[drawn.layout]
    keys = (*keys, f"trainer.total_training_steps={STEPS}", *own(ground, preset))
    folder = ground.folder / name
    run = CliRun(ground.folder / f"{name}.log", ["train", preset, *ground.overrides(name, *keys)])
    deadline = time.monotonic() + 200

    def there() -> list[int]:
        return [run.pid] if drawn.victim == "driver" else named(PROCESSES[drawn.victim], run.pid)

    while not (pids := there()) or num_records(folder) < drawn.records:
        if not run.running or time.monotonic() > deadline:
            raise Missed(f"status {run.status()}")
        time.sleep(0.01 if pids else 0.3)
    time.sleep(drawn.delay_s)
    held = Held.below(run.pid)
    victim = rng.choice(there() or pids)
    if not run.running:
        raise Missed
    os.kill(victim, drawn.number)
    return run, held, victim, time.monotonic()


def num_records(folder: Path) -> int:
    journal = folder / "ledger.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def own(ground: Playground, preset: str) -> tuple[str, ...]:
    return (f"critic.model.path={ground.folder}/critic",) if preset == "ppo" else ()


def wait(run: CliRun, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while run.running and time.monotonic() < end:
        time.sleep(0.1)
    return not run.running


def check(ground: Playground, name: str, drawn: Strike, seed: int) -> str:
    rng = random.Random(f"victim {seed}")
    run, held, victim, when = strike(ground, name, drawn, rng)
    if drawn.victim == "driver" and drawn.number == signal.SIGSTOP:
        time.sleep(rng.choice([3, 70]))
        os.kill(victim, signal.SIGCONT)
    ended = wait(run, NOTICED_WITHIN_S[drawn.number] + 60)
    took = time.monotonic() - when
    said = run.said()
    if not ended:
        raise AssertionError(f"it has not ended within {took:.0f} s of the strike: {said[-3000:]}")
    status = run.status()
    while held.left() and time.monotonic() < when + took + 20:
        time.sleep(0.2)
    left = held.left()
    for pid in left.pids:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}; {said[-2000:]}"
    folder = ground.folder / name
    last = said.strip().splitlines()[-1] if said.strip() else ""
    told = f"status {status} after {took:.0f} s | {last}"
    warnings = list(notes(folder, "warning")) if (folder / "events.jsonl").exists() else []
    told += f" | {warnings}" if warnings else ""
    errors = []
    if "Traceback" in said:
        errors.append("a traceback is shown")
    if drawn.victim == "driver":
        wanted = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGSTOP: 0}[drawn.number]
        if status != wanted:
            errors.append(f"status {status}, not {wanted}")
    elif status != 0:
        names = {
            "worker": r"worker \d",
            "coordinator": "coordinator",
            "exchange": "exchange",
            "gcs": "gcs_server",
            "raylet": "raylet",
        }
        if not re.search(names[drawn.victim], last) or status != 1:
            errors.append("it is not named")
    preset, keys = LAYOUTS[drawn.layout]
    keys = (*keys, f"trainer.total_training_steps={STEPS}", *own(ground, preset))
    if status != 0:
        again = CliRun(
            ground.folder / f"{name}-again.log", ["train", preset, *ground.overrides(name, *keys)]
        )
        assert wait(again, 240), f"the resume hangs: {again.said()[-2000:]}"
        if again.status() != 0:
            errors.append(f"the resume ended with {again.status()}: {again.said()[-2000:]}")
    if hidden := {each for each in os.listdir(folder) if each.startswith(".")} - {
        ".distflow-run",
        ".writer",
    }:
        errors.append(f"files left: {hidden}")
    left_run = Left(folder)
    if left_run.checkpoint.step != STEPS:
        errors.append(f"ended at step {left_run.checkpoint.step}")
    rows = left_run.trained_rows()
    if len(rows) != 4 * STEPS or left_run.group_counts()["dropped"]:
        errors.append(f"account {left_run.group_counts()}, {len(rows)} trained")
    if drawn.layout != "stream":
        alone = Left(ground.folder / f"alone-{preset}")
        if rows != alone.trained_rows():
            errors.append("other rows")
        away = distance(weights(left_run), weights(alone))
        if away > 1e-6:
            errors.append(f"weights are {away} away")
    if errors:
        raise AssertionError(f"{errors} | {told}\n{said[-3000:]}")
    return told


def weights(left: Left) -> dict:
    return {name: tensor for name, tensor in left.tensors().items() if ".model." in name}


def make_ground(folder: Path) -> Playground:
    ground = Playground(folder)
    ground.write_critic()
    for preset in ("grpo", "ppo"):
        keys = (*LAYOUTS["dp_groups" if preset == "ppo" else "apart"][1][:-1], *own(ground, preset))
        keys = (*keys, f"trainer.total_training_steps={STEPS}", "trainer.launcher=local")
        run = CliRun(
            folder / f"alone-{preset}.log",
            ["train", preset, *ground.overrides(f"alone-{preset}", *keys)],
        )
        assert run.status() == 0, run.said()
    return ground


def main(seeds: list[int]) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    ground = make_ground(Path(tempfile.mkdtemp()))
    for seed in seeds:
        drawn = draw(seed)
        started = time.monotonic()
        name = f"run-{seed}"
        try:
            told = f"ok {check(ground, name, drawn, seed)}"
        except Missed as missed:
            told = f"missed {missed}"
        except Exception as err:
            told = (
                f"FAILED {type(err).__name__}: {err}"
                if isinstance(err, AssertionError)
                else traceback.format_exc()
            )
        print(
            (
                f"{time.strftime('%H:%M:%S')} seed {seed} {drawn} {time.monotonic() - started:.0f} "
                f"s: {told}"
            ),
            flush=True,
        )
        if told.startswith("ok"):
            shutil.rmtree(ground.folder / name, ignore_errors=True)


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]])
