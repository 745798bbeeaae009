"""Whole runs on a device: a few steps with every check, LoRA, bfloat16, kills and resumes, and on
from a CPU."""

import pytest

from tests.e2e.cli_runs import CliRun, Left, same_run
from tests.e2e.runs import Playground

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
RUNS = {
    "grpo": (),
    "lora": ("actor_rollout_ref.model.lora_rank=2",),
    "bfloat16": ("actor_rollout_ref.model.dtype=bfloat16",),
    "stale": ("async.max_staleness=1",),
    "decoupled": (
        "actor_rollout_ref.actor.policy_loss=decoupled",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
}


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=8)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_passes_its_checks(ground, device, name):
    """Its checks compare log-probs, receipts of weights, ratios, gradients and the optimizer's
    steps."""
    more = ("trainer.total_training_steps=3", "trust.check_freq=1", f"trainer.device={device.type}")
    run = ground.run("grpo", *RUNS[name], *more)
    steps = run.metrics()
    assert len(steps) == 3 and all(step["actor/skipped"] == 0 for step in steps)
    assert not run.notes("warning"), run.notes("warning")
    assert len(run.notes("checks")) == 3


def start(ground: Playground, device: str, name: str, *more: str) -> CliRun:
    keys = ground.overrides(
        name, f"trainer.device={device}", "trainer.total_training_steps=4", "trainer.save_freq=1"
    )
    return CliRun(
        ground.folder / f"{name}.log", ["train", "grpo", "trust.check_rewards=false", *keys, *more]
    )


def finish(ground: Playground, device: str, name: str, *more: str) -> Left:
    run = start(ground, device, name, *more)
    assert run.status() == 0, run.said()
    return Left(ground.folder / name)


def test_a_killed_run_ends_with_the_same_bits(ground, device):
    whole = finish(ground, device.type, "whole")
    killed = start(ground, device.type, "killed")
    killed.wait_for(
        lambda: (ground.folder / "killed/checkpoints/step-000002/manifest.json").exists()
    )
    assert killed.kill()
    same_run(whole, finish(ground, device.type, "killed", "--resume", "auto"))


def test_a_run_goes_on_on_another_device(ground, device):
    finish(ground, "cpu", "moved", "trainer.total_training_steps=2")
    moved = finish(ground, device.type, "moved", "--allow-change", "trainer.device")
    assert moved.checkpoint.step == 4
