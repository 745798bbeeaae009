"""Runs on the rehearsal's device through the command: they leave what they leave on a CPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from distflow import cli
from tests.device.rehearsal import on_device
from tests.e2e.runs import Playground, Run

pytestmark = pytest.mark.slow
ROLLOUT, MODEL, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.model", "actor_rollout_ref.actor"
STEPS = "trainer.total_training_steps=3"
# Adam divides by the size of a gradient, so that the last bit of a small one would be all that is seen.
ALIKE = (
    f"{ACTOR}.optim.optimizer=sgd",
    f"{ACTOR}.optim.lr=0.1",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
    "trainer.save_freq=3",
    "trust.check_rewards=false",
)
RUNS = {
    "hf": ("grpo", f"{ROLLOUT}.name=hf"),
    "embedded": ("grpo", f"{ROLLOUT}.name=embedded"),
    "batch invariant": ("grpo", f"{ROLLOUT}.batch_invariant=true"),
    "lora": ("grpo", f"{MODEL}.lora_rank=2", f"{ACTOR}.use_kl_loss=true"),
    "checkpointing": ("grpo", f"{MODEL}.enable_gradient_checkpointing=true", "algorithm.recompute_old_log_probs=true"),
    "ppo": ("ppo",),
    "offload": (
        "grpo",
        *(f"{ACTOR}.param_offload=true", f"{ACTOR}.optimizer_offload=true"),
    ),
}


def run_on(device: str, ground: Playground, preset: str, *more: str) -> Run:
    """By the command, which must succeed; without an audit on the CPU, of which only the numbers matter."""
    keys = ground.overrides(device, STEPS, *ALIKE, f"trainer.device={device}", *more)
    assert cli.main(["sft" if preset == "sft" else "train", *([] if preset == "sft" else [preset]), *keys]) == 0
    config, _ = ground.spec(preset, STEPS, *ALIKE, f"trainer.device={device}", *more, name="read")
    return Run(ground.folder / device, config, None)


def same_numbers(ours: Run, theirs: Run, steps: int = 3) -> None:
    """Weights and metrics to 1e-6."""
    assert len(ours.metrics()) == len(theirs.metrics()) == steps
    for here, there in zip(ours.metrics(), theirs.metrics(), strict=True):
        for name in here:
            if name.startswith(("actor/", "critic/", "sft/", "reward", "score", "rollout_corr/")):
                assert here[name] == pytest.approx(there[name], rel=1e-4, abs=1e-6), name
    close(ours.weights(steps), theirs.weights(steps))


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", RUNS)
@on_device
def test_a_run_is_that_of_a_cpu_and_passes_its_audits(tmp_path: Path, name: str) -> None:
    preset, *keys = RUNS[name]
    ground = Playground(tmp_path, num_rows=8)
    here = run_on("cpu", ground, preset, *keys, "trust.audit_freq=0") if name != "offload" else None
    there = run_on("rehearsal", ground, preset, *keys, "trust.audit_freq=1")
    assert not there.notes("warning"), there.notes("warning")
    assert len(there.notes("audit")) == 3
    same_numbers(here or run_on("cpu", ground, preset, "trust.audit_freq=0"), there)
