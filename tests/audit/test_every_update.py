"""What is checked of every update and every step, where no audit and no look is made any more: a fault in single
updates is found at the first that it strikes, and nothing is said where there is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.audit.audit_schedule import AuditSchedule, Depth
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.training import torch_engine
from tests.e2e.planting import plant_behind, plant_from
from tests.e2e.runs import Playground

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]
slow = pytest.mark.slow
BEGIN = 3  # behind the audits of a run's start
TWO = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=5")
NORM = ("algorithm.adv_norm.mean_level=batch", "algorithm.adv_norm.std_level=batch")


@pytest.fixture
def playground(tmp_path: Path, monkeypatch: Patch) -> Playground:
    monkeypatch.setattr(AuditSchedule, "looks_at", lambda self, step: Depth.NONE)
    return Playground(tmp_path, num_rows=64)


def found(playground: Playground, patch: Patch, plant: Plant, preset: str, *more: str, says: str) -> None:
    steps = plant_from(patch, BEGIN, plant)
    with pytest.raises(TrustError, match=rf"step {BEGIN + 1} found \({says}"):
        playground.run(preset, *TWO, *more)
    assert steps[-1] == BEGIN


def never_cleared(patch: Patch) -> None:
    patch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)


def never_clipped(patch: Patch) -> None:
    original = torch_engine.clip_gradients
    patch.setattr(torch_engine, "clip_gradients", lambda weights, most: original(weights, None))


def a_part_missing(patch: Patch) -> None:
    """As if one of the ranks had given no gradient."""
    original = torch_engine.sum_gradients

    def halved(weights: Any, group: Any) -> None:
        weights = list(weights)
        original(weights, group)
        for weight in weights:
            weight.grad *= 0.5

    patch.setattr(torch_engine, "sum_gradients", halved)


def scaled(factor: float, shift: float = 0.0, node_id: str = "calculate_advantages") -> Plant:
    def change(batch: Batch) -> None:
        batch["advantages"] = batch["advantages"] * factor + shift

    return plant_behind(node_id, change)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        pytest.param(never_cleared, "gradients.: .* began with gradients left over", marks=slow),
        pytest.param(never_clipped, "gradients.: .* was given a gradient of norm", marks=slow),
        pytest.param(a_part_missing, "gradients.: .*(of norm|is not the sum of the micro-batches')"),
    ],
)
def test_gradients_of_updates_that_nothing_else_watches(
    playground: Playground, monkeypatch: Patch, plant: Plant, says: str
) -> None:
    found(playground, monkeypatch, plant, "grpo", "actor_rollout_ref.actor.max_grad_norm=0.1", says=says)


@slow
@pytest.mark.parametrize(
    ("preset", "more", "plant"),
    [
        ("ppo", (), scaled(1.3)),
        ("ppo", (), scaled(0.5)),
        ("ppo", (), scaled(1.0, 0.1)),
        ("grpo", ("algorithm.adv_estimator=reinforce_plus_plus_baseline",), scaled(1.3)),
        ("grpo", NORM, scaled(1.0, 0.1, "advantage_norm")),
    ],
)
def test_advantages_that_are_not_whitened_over_the_step(
    playground: Playground, monkeypatch: Patch, preset: str, more: tuple[str, ...], plant: Plant
) -> None:
    found(playground, monkeypatch, plant, preset, *more, says="advantages.: .*over the step, but have the mean")


@slow
@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("grpo", ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",)),
        ("grpo", NORM),
        ("grpo", ("algorithm.mask_truncated=true", "data.max_response_length=2")),  # most mini-batches are empty
        ("ppo", ("actor_rollout_ref.rollout.n=4",)),
    ],
)
def test_the_same_runs_without_a_fault(playground: Playground, preset: str, more: tuple[str, ...]) -> None:
    run = playground.run(preset, *TWO, *more)
    assert run.notes("error") == []
    assert all("no token in the loss" in warning for warning in run.notes("warning"))
