"""Killed at any moment and started again, a run ends with the bits of one that was never
disturbed."""

import itertools
import random
import time
from pathlib import Path

import pytest

from tests.e2e.cli_runs import CliRun, Left, same_run
from tests.e2e.runs import Playground

# Few scores, so that groups of equal ones occur and dynamic sampling has to draw again.
COARSE_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 3 == 0)
"""
VALIDATED = ("trainer.test_freq=2", "actor_rollout_ref.rollout.val_kwargs.n=2")
PROGRAMS = {
    "grpo": ("actor_rollout_ref.actor.ppo_mini_batch_size=2",),
    "dapo": ("actor_rollout_ref.rollout.n=2", "reward.overlong.buffer_tokens=0"),
    "ppo": (
        "actor_rollout_ref.rollout.n=1",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.01",
        "algorithm.kl_ctrl.horizon=50",
        "critic.optim.lr=1e-3",
    ),
}


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("resume"), num_rows=10)
    ground.write_reward(COARSE_REWARD)
    return ground


def start(
    ground: Playground, pipeline: str, name: str, *overrides: str, flags: tuple[str, ...] = ()
) -> CliRun:
    """Saves each step, validates each second one."""
    more = (
        "trainer.save_freq=1",
        "trust.check_rewards=false",
        f"data.val_files={ground.folder}/rows.jsonl",
    )
    keys = ground.overrides(
        name, *more, "data.val_max_samples=3", *VALIDATED, *PROGRAMS[pipeline], *overrides
    )

    return CliRun(ground.folder / f"{name}.log", ["train", pipeline, *flags, *keys])


def finish(
    ground: Playground, pipeline: str, name: str, *overrides: str, flags: tuple[str, ...] = ()
) -> Left:
    run = start(ground, pipeline, name, *overrides, flags=flags)
    assert run.status() == 0, run.said()
    return Left(ground.folder / name)


def has_saved(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").exists()


@pytest.mark.parametrize("pipeline", ["grpo"])
def test_a_killed_run_ends_as_one_that_was_never_disturbed(ground, pipeline):
    whole = finish(ground, pipeline, f"{pipeline}-whole", "trainer.total_epochs=2")
    assert whole.checkpoint.step == 5
    assert sorted(whole.trained_rows()) == [(epoch, row) for epoch in range(2) for row in range(10)]

    name = f"{pipeline}-killed"
    run = start(ground, pipeline, name, "trainer.total_epochs=2")
    run.wait_for(lambda: has_saved(ground.folder / name, 2))
    assert run.kill()
    resumed = finish(ground, pipeline, name, "trainer.total_epochs=2", flags=("--resume", "auto"))
    assert "resumed from step-00000" in (ground.folder / f"{name}.log").read_text()
    same_run(whole, resumed)
    assert (ground.folder / name / "report.html").exists()


@pytest.mark.slow
def test_after_the_end_there_is_nothing_to_do_and_epochs_can_be_added(ground):
    constant = "actor_rollout_ref.actor.optim.scheduler=constant"
    whole = finish(ground, "grpo", "three", "trainer.total_epochs=3", constant)
    finish(ground, "grpo", "grown", "trainer.total_epochs=2", constant)
    finish(ground, "grpo", "grown", "trainer.total_epochs=2", constant)
    log = (ground.folder / "grown.log").read_text()
    assert log.count("report: ") == 2 and log.count("step 5/5  reward") == 1

    # Two epochs of 10 rows are 5 full steps: the third goes on as if it had been asked for at once.
    grown = finish(ground, "grpo", "grown", "trainer.total_epochs=3", constant)
    assert sorted(grown.trained_rows()) == [(epoch, row) for epoch in range(3) for row in range(10)]
    assert [t.equal(whole.tensors()[name]) for name, t in grown.tensors().items()].count(False) == 0


@pytest.mark.slow
def test_epochs_added_behind_a_short_last_step_are_trained_whole(ground):
    first = finish(ground, "grpo", "short", "trainer.total_epochs=1")
    assert (first.checkpoint.step, len(first.trained_rows())) == (3, 10)
    grown = finish(ground, "grpo", "short", "trainer.total_epochs=2")
    assert (grown.checkpoint.step, len(grown.trained_rows())) == (6, 20)
    assert sorted(grown.trained_rows()) == [(epoch, row) for epoch in range(2) for row in range(10)]


def steps_journaled(folder: Path) -> int:
    path = folder / "ledger.jsonl"
    return path.read_bytes().count(b'"kind":"version"') if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    ["grpo", *(pytest.param(name, marks=pytest.mark.by_hand) for name in ("dapo", "ppo"))],
)
def test_twenty_kills_at_random_moments(ground, pipeline):
    """While it starts, and from a step's end on: while it validates, saves, generates, trains."""
    keys = ("trainer.total_epochs=8",)
    began = time.monotonic()
    run = start(ground, pipeline, f"{pipeline}-long", *keys)
    run.wait_for(lambda: has_saved(ground.folder / f"{pipeline}-long", 1))
    startup_s = time.monotonic() - began
    assert run.status() == 0, run.said()
    whole = Left(ground.folder / f"{pipeline}-long")
    step_s = (time.monotonic() - began - startup_s) / whole.checkpoint.step
    if pipeline == "dapo":
        assert whole.group_counts()["dropped"]["all_equal"] > 5

    draw = random.Random(pipeline)
    fired = 0
    for number in itertools.count():
        name = f"{pipeline}-hunted-{number}"
        fired += hunt(ground, pipeline, name, keys, draw, 20 - fired, startup_s, step_s)
        survivor = finish(ground, pipeline, name, *keys)
        same_run(whole, survivor)
        consumed = survivor.group_counts()["consumed"]
        dropped = sum(survivor.group_counts()["dropped"].values())
        assert consumed + dropped == survivor.group_counts()["issued"] == 80
        if fired == 20:
            break


def hunt(
    ground: Playground,
    pipeline: str,
    name: str,
    keys: tuple[str, ...],
    draw: random.Random,
    kills: int,
    startup_s: float,
    step_s: float,
) -> int:
    """Start and kill a run until it was killed so many times, or was quicker and came to its end.
    The kills."""
    for fired in range(kills):
        before = steps_journaled(ground.folder / name)
        run = start(ground, pipeline, name, *keys)

        if draw.random() < 0.4:
            time.sleep(draw.uniform(0.0, startup_s))
        else:
            while run.running and steps_journaled(ground.folder / name) == before:
                time.sleep(0.002)
            time.sleep(draw.uniform(0.0, step_s))

        if not run.kill():
            assert run.status() == 0, run.said()
            return fired

    return kills
