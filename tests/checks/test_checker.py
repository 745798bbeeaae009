"""What the checks of every update and step, and of a checked step, find: a fault in plumbing at the
first step that it strikes, and nothing where there is none."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from distflow.checks.schedule import CheckSchedule
from distflow.checks.update_records import striped, trained
from distflow.errors import TrustError
from distflow.pipelines.nodes import reward_samples
from distflow.rollout.embedded import engine as embedded
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.weight_sync.sender import WeightSync
from distflow.training import torch_engine
from distflow.training.torch_engine import TorchTrainEngine
from tests.e2e.planting import plant_from
from tests.e2e.runs import Playground

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]
slow = pytest.mark.slow
BEGIN = 3
TWO = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.total_training_steps=5")


@pytest.fixture
def playground(tmp_path):
    return Playground(tmp_path, num_rows=64)


def no_step_is_checked(patch: Patch) -> None:
    """Only what every step has is left."""
    patch.setattr(CheckSchedule, "is_due", lambda self, step: False)


def found(
    playground: Playground, patch: Patch, plant: Plant, preset: str, *more: str, says: str
) -> None:
    steps = plant_from(patch, BEGIN, plant)
    with pytest.raises(TrustError, match=rf"step {BEGIN + 1} found \({says}"):
        playground.run(preset, *TWO, *more)
    assert steps[-1] == BEGIN


def never_cleared(patch: Patch) -> None:
    patch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)


@slow
def test_gradients_that_are_kept_where_no_look_is_made(playground, monkeypatch):
    no_step_is_checked(monkeypatch)
    found(
        playground,
        monkeypatch,
        never_cleared,
        "grpo",
        says=r"gradients\): .* began with gradients left over",
    )


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


def twice_the_loss(patch: Patch) -> None:
    """The optimizer and the clipping see a gradient that is consistent in itself."""
    backward = torch.Tensor.backward
    patch.setattr(torch.Tensor, "backward", lambda self: backward(self * 2.0))


def a_micro_batch_left_out(patch: Patch) -> None:
    patch.setattr(torch.Tensor, "backward", lambda self: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        pytest.param(never_cleared, "gradients.: .* began with gradients left over", marks=slow),
        pytest.param(never_clipped, "gradients.: .* was given a gradient of norm", marks=slow),
        pytest.param(twice_the_loss, "gradients.: .* entered the gradient 2 times instead of once"),
        pytest.param(
            a_micro_batch_left_out,
            "gradients.: .* entered the gradient 0 times instead of once",
            marks=slow,
        ),
        pytest.param(
            a_part_missing, "gradients.: .*(of norm|is not the sum of the micro-batches')"
        ),
    ],
)
def test_gradients_of_updates_that_nothing_else_watches(playground, monkeypatch, plant, says):
    found(
        playground,
        monkeypatch,
        plant,
        "grpo",
        "actor_rollout_ref.actor.max_grad_norm=0.1",
        says=says,
    )


def stands_still(patch: Patch) -> None:
    """A weight that is not among the few whose gradient is summed."""
    original = TorchTrainEngine._step

    def planted(self: TorchTrainEngine, lrs: list[float]) -> None:
        watched = dict(striped(trained(self.model), BEGIN))
        name, weight = next(
            each for each in self.model.named_parameters() if each[0] not in watched
        )
        before = weight.detach().clone()
        original(self, lrs)
        weight.detach().copy_(before)

    patch.setattr(TorchTrainEngine, "_step", planted)


def test_a_weight_that_stands_still(playground, monkeypatch):
    found(
        playground,
        monkeypatch,
        stands_still,
        "grpo",
        says="optimizer.: model.* moved by 0 at most",
    )


@slow
def test_a_sync_that_is_left_out(playground, monkeypatch):
    send = WeightSync.send

    def planted(self: WeightSync, version: Any) -> Any:
        return (False, {}) if version.step == BEGIN else send(self, version)

    with monkeypatch.context() as patch:
        patch.setattr(WeightSync, "send", planted)
        with pytest.raises(
            TrustError,
            match=f"step {BEGIN + 1} .* version {BEGIN - 1} .* {BEGIN} ",
        ):
            playground.run("grpo", *TWO, "async.max_staleness=2", name="unsent")


VALIDATING = ("data.allow_overlap=true", "trainer.test_freq=1")


@slow
@pytest.mark.parametrize("ends", [True, False])
def test_responses_that_continue_after_a_stop_string(playground, monkeypatch, ends):
    original = embedded.finish_reason

    def misses_strings(ids: list[int], params: Any, tokenizer: Any) -> Any:
        return original(ids, params if ends else replace(params, stop=()), tokenizer)

    plant_from(
        monkeypatch, BEGIN, lambda patch: patch.setattr(embedded, "finish_reason", misses_strings)
    )

    says = (
        rf"step {BEGIN + 2} found \(responses\): sample \S+ continues after a stop "
        r"token or text"
    )
    with nullcontext() if ends else pytest.raises(TrustError, match=says):
        playground.run(
            "grpo", *TWO, "actor_rollout_ref.rollout.stop=[a, b, c, d, e, f, g, h, 'i', j, k]"
        )


@slow
def test_scores_with_a_bonus_that_no_function_gives(playground, monkeypatch):
    def with_bonus(patch: Patch) -> None:
        scored = reward_samples._scored

        def planted(*arguments: Any) -> Any:
            columns = scored(*arguments)
            return columns | {"scores": [score + 0.1 for score in columns["scores"]]}

        patch.setattr(reward_samples, "_scored", planted)

    plant_from(monkeypatch, BEGIN, with_bonus)
    with pytest.raises(
        TrustError, match=rf"step {BEGIN + 2} found \(rewards\): sample \S+ .* score"
    ):
        playground.run("grpo", *TWO)


@slow
def test_parts_of_responses_that_are_trained_on(playground, monkeypatch):
    def cut(patch: Patch) -> None:
        make = Group.sample

        def planted(group: Group, index: int, segment: Any, *rest: Any) -> Any:
            columns = ("token_ids", "rollout_log_probs", "sampling_log_probs", "versions")
            short = {name: getattr(segment, name)[:-1] for name in columns}
            return make(group, index, replace(segment, **short), *rest)

        patch.setattr(Group, "sample", planted)

    plant_from(monkeypatch, BEGIN, cut)
    with pytest.raises(
        TrustError,
        match=rf"step {BEGIN + 2} found \(responses\): response_ids ",
    ):
        playground.run("grpo", *TWO)


FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if sum(map(ord, solution_str)) % 3 == 0:
        raise ValueError("no")
    return sum(map(ord, solution_str)) % 7 / 6
"""


@slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_errors_of_a_validation_that_count_as_scores(playground, monkeypatch, is_planted):
    scored = reward_samples._scored

    def planted(outcomes: Any, validating: bool, *more: Any) -> Any:
        return scored(outcomes, validating and not is_planted, *more)

    monkeypatch.setattr(reward_samples, "_scored", planted)
    playground.write_reward(FAILING)
    keys = (
        *VALIDATING,
        f"data.val_files={playground.folder}/rows.jsonl",
        "reward.on_error={score: 0}",
    )
    says = r"\(validation\): val/errors is reported as 0, but \d+ by the recorded scores"
    with pytest.raises(TrustError, match=says) if is_planted else nullcontext():
        playground.run("grpo", *TWO, *keys, "reward.max_error_rate=0.9")


def one_weight_drawn_anew(patch: Patch) -> None:
    original = TorchTrainEngine._step

    def planted(self: TorchTrainEngine, lrs: list[float]) -> None:
        original(self, lrs)
        [*self._trainable.values()][-2].data.normal_()

    patch.setattr(TorchTrainEngine, "_step", planted)


@slow
def test_a_weight_that_something_else_writes_in_an_update(playground, monkeypatch):
    says = r"optimizer\): .*lora_A.* moved by"
    found(
        playground,
        monkeypatch,
        one_weight_drawn_anew,
        "grpo",
        "actor_rollout_ref.model.lora_rank=2",
        says=says,
    )
