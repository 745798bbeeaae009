"""Silent faults in plumbing, planted one at a time into real runs: the checks of a step name each.

Faults in formulas, which no run can notice, are in `tests/references`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from distflow.algorithms import objectives
from distflow.checks.checker import Checker
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.launch import engines, train_engines
from distflow.rewards import router
from distflow.rewards.pool.pool import RewardPool
from distflow.rollout import engine_weights
from distflow.rollout.embedded import scheduler as sequences
from distflow.runtime import node_context
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine
from tests.e2e.planting import plant_before_update, plant_behind
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in

Patch = pytest.MonkeyPatch
GRPO = ("grpo",)
TWO = (
    "grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
)
KL = (
    "grpo",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.5",
)
SMALL_MICROS = ("grpo", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40")
SCORED = ("grpo", "algorithm.recompute_old_log_probs=true")
FAST = ("actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.scheduler=constant")


@dataclass(frozen=True)
class Fault:
    """plant: the change. config: preset and overrides. seen: what the message says."""

    plant: Callable[[Patch], None]
    seen: str
    config: tuple[str, ...] = GRPO


def column(name: str, rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Batch], None]:
    def change(batch: Batch) -> None:
        batch[name] = rule(batch[name])

    return change


def before_update(change: Callable[[Batch], None]) -> Callable[[Patch], None]:
    return lambda patch: plant_before_update(patch, change)


def attribute(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Replace `owner.name` by `wrap` of it."""
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def off_by_one(mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (1, 0))[:, :-1] * mask


def first_turned(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([-values[:1], values[1:]])


def per_micro_batch(original: Any) -> Any:
    return lambda mask, mode, counts, *more, **named: original(
        mask, mode, objectives.loss_counts(mask), *more, **named
    )


def follow(config: Config, get: Any, device: Any) -> TorchScorer:
    options = train_engines.reference_options(config)
    return TorchScorer(get("policy"), group=get("collective"), **options)


def next_sample(original: Any) -> Any:
    async def planted(self: Any, samples: Any) -> Any:
        found = await original(self, samples)
        return found[1:] + found[:1]

    return planted


def in_order_of_arrival(original: Any) -> Any:
    waiting: list[Any] = []

    async def planted(*call: Any) -> Any:
        waiting.append(await original(*call))
        return waiting.pop(0) if len(waiting) > 2 else waiting[0]

    return planted


def neighbours_accuracy(original: Any) -> Any:
    async def planted(self: Any, samples: Any) -> Any:
        found = await original(self, samples)
        turned = [*found[1:], found[0]]
        return [
            replace(own, accuracy=next_one.accuracy)
            for own, next_one in zip(found, turned, strict=True)
        ]

    return planted


def unsent_on_odd_steps(original: Any) -> Any:
    def planted(self: Any, version: Any, at_start: bool = False) -> Any:
        return {} if version.step % 2 else original(self, version, at_start)

    return planted


def unread_on_odd_steps(patch: Patch) -> None:
    original = engine_weights.copy_weights

    def planted(module: Any, weights: Any) -> Any:
        from distflow.rollout.engine_weights import stripe_hashes

        planted.calls += 1  # type: ignore[attr-defined]
        if planted.calls % 2:  # type: ignore[attr-defined]
            return original(module, weights)
        return stripe_hashes(weights)

    planted.calls = 0  # type: ignore[attr-defined]
    patch.setattr(engine_weights, "copy_weights", planted)


def no_learning_rate(original: Any) -> Any:
    return lambda self, lrs: original(self, [0.0 for _ in lrs])


def last_dropped(original: Any) -> Any:
    return lambda *arguments: original(*arguments)[:-1]


def finished_always(patch: Patch) -> None:
    from distflow.data.sample import Sample

    patch.setattr(Sample, "truncated", property(lambda self: False))


def one_stream(original: Any) -> Any:
    return lambda stream, sample: original(stream, 0)


def estimator(rule: Callable[[Batch], None]) -> Callable[[Patch], None]:
    return plant_behind("calculate_advantages", rule)


def twice_backward(patch: Patch) -> None:
    from distflow.training import torch_engine

    original = torch_engine.sum_gradients

    def planted(parameters: Any, group: Any) -> None:
        trained = list(parameters)
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        original(trained, group)

    patch.setattr(torch_engine, "sum_gradients", planted)


def other_rows(patch: Patch) -> None:
    from distflow.scheduling import data_plan

    patch.setattr(data_plan, "place", lambda number, num_rows, *order: (number // num_rows, 0))


FAULTS = {
    "a loss mask off by one": Fault(before_update(column("loss_mask", off_by_one)), "mini-batches"),
    "a mean per micro-batch": Fault(
        attribute(objectives, "token_weights", per_micro_batch), "loss", SMALL_MICROS
    ),
    "a loss mask off by one, early": Fault(
        plant_behind("actor_old_log_prob", column("loss_mask", off_by_one)), "masks", SCORED
    ),
    "advantages of one sample turned": Fault(
        estimator(column("advantages", first_turned)), "advantages"
    ),
    "the reference shifted": Fault(
        plant_behind("reference_log_prob", column("ref_log_prob", lambda v: v.roll(1, dims=1))),
        "log_probs",
        KL,
    ),
    "the reference follows the policy": Fault(
        lambda patch: patch.setattr(engines, "build_reference", follow),
        "reference",
        (*KL, *FAST),
    ),
    "rewards to the next sample": Fault(
        attribute(router.RewardRouter, "__call__", next_sample), "reward_results|advantages"
    ),
    "rewards in order of arrival": Fault(
        attribute(RewardPool, "call", in_order_of_arrival),
        "reward_results",
        ("grpo", "trust.check_rewards=false"),
    ),
    "a neighbour's accuracy": Fault(
        attribute(router.RewardRouter, "__call__", neighbours_accuracy),
        "has the accuracy",
        ("dapo",),
    ),
    "weights not sent on odd steps": Fault(
        attribute(WeightSender, "sync", unsent_on_odd_steps), "did not reach it"
    ),
    "weights not taken on odd steps": Fault(
        unread_on_odd_steps,
        "version 1 .* different tensors: ",
        ("grpo", "actor_rollout_ref.model.dtype=bfloat16", *FAST),
    ),
    "a learning rate of 0 behind the metric": Fault(
        attribute(TorchTrainEngine, "_step", no_learning_rate), "optimizer", ("grpo", *FAST)
    ),
    "the last mini-batch dropped": Fault(
        attribute(node_context, "minibatches", last_dropped), "mini-batches", TWO
    ),
    "truncated counts as finished": Fault(finished_always, "responses"),
    "one seed for the samples of a group": Fault(
        attribute(sequences, "sample_key", one_stream), "draws"
    ),
    "gradients doubled": Fault(twice_backward, "gradients"),
    "one row for all groups": Fault(other_rows, "groups"),
    "a score on the first token": Fault(
        plant_behind(
            "actor_old_log_prob", column("token_level_scores", lambda s: s.roll(1, dims=1))
        ),
        "rewards",
        ("ppo",),
    ),
}


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    return Playground(tmp_path_factory.mktemp("run"))


def told_by(seen: str, step: str) -> str:
    """What the error says: the step and the check that found it, or words of no check."""
    if " " in seen:
        return seen

    return rf"step {step} found \(({seen})\)"


@pytest.mark.parametrize("name", one_fast_in(99, FAULTS))
def test_a_planted_fault_is_named(playground, monkeypatch, name):
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    with pytest.raises(TrustError, match=told_by(fault.seen, "[1-3]")):
        preset, *overrides = fault.config
        name = f"fault-{list(FAULTS).index(name)}"
        playground.run(preset, *overrides, "trainer.total_training_steps=3", name=name)


LATE = (
    "advantages of one sample turned",
    "the reference shifted",
    "rewards to the next sample",
    "weights not sent on odd steps",
    "a learning rate of 0 behind the metric",
    "the last mini-batch dropped",
    "gradients doubled",
    "a score on the first token",
)
"""Faults that begin after the start."""


@pytest.mark.parametrize("name", one_fast_in(99, LATE))
def test_a_fault_that_begins_late_and_is_rare(playground, monkeypatch, name):
    """In one of three steps from the sixth on."""
    fault = FAULTS[name]
    step_taken = Checker.step_taken
    steps: list[int] = []

    def planted(self: Checker, step: int, *arguments: Any) -> None:
        steps.append(step)
        late.undo()
        if step >= 5 and (step - 5) % 3 == 0:
            fault.plant(late)
        step_taken(self, step, *arguments)

    with pytest.MonkeyPatch.context() as late:
        monkeypatch.setattr(Checker, "step_taken", planted)
        preset, *overrides = fault.config

        with pytest.raises(TrustError, match=told_by(fault.seen, "([6-9]|1[0-4])")):
            playground.run(
                preset,
                *overrides,
                "trainer.total_training_steps=14",
                "trust.check_freq=1000",
                name=f"late-{LATE.index(name)}",
            )

    assert 5 <= steps[-1] <= 8, "in the first or second step with the fault"


@pytest.mark.slow
def test_a_group_of_another_row_is_found(playground, monkeypatch):
    from distflow.scheduling import data_plan

    original = data_plan.place
    monkeypatch.setattr(
        data_plan, "place", lambda number, *more: original(number + (number == 13), *more)
    )

    with pytest.raises(TrustError, match=r"step 4 found \(groups\): group 1[34] "):
        playground.run("grpo", "trainer.total_training_steps=4", name="another-row")
