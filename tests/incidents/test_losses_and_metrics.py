"""Incidents of other systems in what a step computes, planted into real runs from the seventh step
on. Each test is named after what happened, and
names the repository and its issue."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distflow.errors import TrustError
from distflow.training import torch_engine
from tests.e2e.planting import plant_from
from tests.e2e.runs import Playground
from tests.sparse_params import BY_HAND, one_fast_in

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]
BEGIN = 6
STEPS = ("trainer.total_training_steps=9",)
MICROS = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",)


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path, num_rows=64)


def found(playground: Playground, patch: Patch, plant: Plant, *more: str, says: str) -> str:
    """The message of the run that a fault ends in one of the two steps that have it."""
    steps = plant_from(patch, BEGIN, plant)
    with pytest.raises(TrustError, match=says) as raised:
        playground.run("grpo", *STEPS, *more)
    assert BEGIN <= steps[-1] <= BEGIN + 1
    return str(raised.value)


def scaled_by_accumulation(how: Callable[[int], float]) -> Plant:
    """Every micro-batch's gradient is also divided, or multiplied, by their number."""

    def plant(patch: Patch) -> None:
        original = torch_engine.micro_batches
        number = [1]
        backward = torch.Tensor.backward

        def micro_batches(*arguments: Any) -> Any:
            index = list(original(*arguments))
            number[:] = [len(index)]
            return index

        patch.setattr(torch_engine, "micro_batches", micro_batches)
        patch.setattr(torch.Tensor, "backward", lambda self: backward(self * how(number[0])))

    return plant


FACTORS = [lambda n: 4.0, lambda n: 0.5, lambda n: 1 / n, float]


@pytest.mark.slow
@pytest.mark.parametrize("how", one_fast_in(len(FACTORS), FACTORS, others=BY_HAND))
def test_a_loss_scaled_by_the_accumulation(playground, monkeypatch, how):
    """huggingface/trl#6024, modelscope/ms-swift#10117."""
    found(
        playground,
        monkeypatch,
        scaled_by_accumulation(how),
        *MICROS,
        says="entered the gradient .* times instead of once",
    )
