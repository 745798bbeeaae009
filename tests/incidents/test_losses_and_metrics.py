"""Incidents of other systems in what a step computes and reports, planted into real runs from the
sixth step on, when no whole audit is made any more. Each test is named after what happened, and
names the repository and its issue."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.algorithms.objectives import PolicyObjective
from distflow.audit.audited_step import metrics as audit_metrics
from distflow.config.keys.trainer import StopCondition
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.models import lora
from distflow.pipelines.nodes import rollout_reward_filter, updates
from distflow.runtime import step_metrics, worker
from distflow.runtime.rollout_loop import group_tasks
from distflow.scheduling.data_plan import Timetable
from distflow.scheduling.group_states import PromptGroup
from distflow.training import torch_engine
from tests.e2e.planting import plant_behind, plant_from
from tests.e2e.runs import Playground
from tests.sparse_params import BY_HAND, one_fast_in

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]
BEGIN = 6
STEPS = ("trainer.total_training_steps=9",)
MICROS = ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40",)


@pytest.fixture
def playground(tmp_path: Path) -> Playground:
    return Playground(tmp_path, num_rows=64)


def found(playground: Playground, patch: Patch, plant: Plant, *more: str, says: str) -> str:
    """The message of the run that a fault ends in one of the two steps that have it."""
    steps = plant_from(patch, BEGIN, plant)
    with pytest.raises(TrustError, match=says) as raised:
        playground.run("grpo", *STEPS, *more)
    assert BEGIN <= steps[-1] <= BEGIN + 1
    return str(raised.value)


def scaled_by_accumulation(how: Callable[[int], float]) -> Plant:
    """Every micro-batch's loss is also divided, or multiplied, by their number."""

    def plant(patch: Patch) -> None:
        original = torch_engine.micro_batches
        number = [1]
        call = PolicyObjective.__call__

        def micro_batches(*arguments: Any) -> Any:
            index = list(original(*arguments))
            number[:] = [len(index)]
            return index

        def called(self: PolicyObjective, *arguments: Any) -> Any:
            loss, sums = call(self, *arguments)
            return loss * how(number[0]), sums

        patch.setattr(torch_engine, "micro_batches", micro_batches)
        patch.setattr(PolicyObjective, "__call__", called)

    return plant


FACTORS = [lambda n: 4.0, lambda n: 0.5, lambda n: 1 / n, float]


@pytest.mark.slow
@pytest.mark.parametrize("how", one_fast_in(len(FACTORS), FACTORS, others=BY_HAND))
def test_a_loss_scaled_by_the_accumulation(
    playground: Playground, monkeypatch: Patch, how: Callable[[int], float]
) -> None:
    """huggingface/trl#6024, modelscope/ms-swift#10117."""
    found(
        playground,
        monkeypatch,
        scaled_by_accumulation(how),
        *MICROS,
        says="times the formula's at every token",
    )


def other_metrics(change: Callable[[Any, dict[str, float]], Mapping[str, float]]) -> Plant:
    """change: of the metrics of a step's samples, given these."""

    def plant(patch: Patch) -> None:
        original = worker.batch_metrics
        patch.setattr(
            worker, "batch_metrics", lambda figures: dict(change(figures, original(figures)))
        )

    return plant


def never_cleared() -> Plant:
    """modelscope/ms-swift#9884."""
    seen = [1.0]

    def change(figures: Any, metrics: dict[str, float]) -> dict[str, float]:
        seen.append(metrics["reward/mean_score"])
        return metrics | {"reward/mean_score": math.fsum(seen) / len(seen)}

    return other_metrics(change)


def over_padding(patch: Patch) -> None:
    """huggingface/trl#6809."""
    original = updates._over

    def over(rows: Any) -> dict[str, float]:
        return {
            name: value * (0.9 if name == "entropy" else 1)
            for name, value in original(rows).items()
        }

    patch.setattr(updates, "_over", over)


def last_mini_batch_alone(patch: Patch) -> None:
    original = updates._over
    patch.setattr(updates, "_over", lambda rows: original(rows[-1:]))


LIES: dict[str, tuple[Plant, str]] = {
    "a mean over all steps so far": (never_cleared(), "reward/mean_score"),
    "a mean reward that ignores half of the samples": (
        other_metrics(
            lambda f, m: m | {"reward/mean_score": float(f.scores[: len(f.scores) // 2].mean())}
        ),
        "reward/mean_score",
    ),
    "lengths that count prompts": (
        other_metrics(
            lambda f, m: m | {"rollout/avg_response_length": f.num_tokens / len(f.valid)}
        ),
        "rollout/avg_response_length",
    ),
    "a truncated share of 0": (
        other_metrics(lambda f, m: m | {"rollout/truncated": 0.0}),
        "rollout/truncated",
    ),
    "a spread that is too small": (
        other_metrics(lambda f, m: m | {"reward/std": 0.8 * m["reward/std"]}),
        "reward/std",
    ),
    "the largest score of a few": (
        other_metrics(lambda f, m: m | {"reward/max": float(f.scores.min())}),
        "reward/max",
    ),
    "lengths of prompts with one token more": (
        other_metrics(
            lambda f, m: m | {"rollout/avg_prompt_length": m["rollout/avg_prompt_length"] + 1}
        ),
        "rollout/avg_prompt_length",
    ),
    "groups that never score alike": (
        other_metrics(
            lambda f, m: (
                m | {"reward/frac_reward_zero_std": m["reward/frac_reward_zero_std"] - 0.25}
            )
        ),
        "reward/frac_reward_zero_std",
    ),
    "a part's mean over samples without it": (
        other_metrics(lambda f, m: m | {"reward/custom/mean": 0.9 * m["reward/custom/mean"]}),
        "reward/custom/mean",
    ),
    "an entropy over padding": (over_padding, "actor/entropy"),
    "of the last mini-batch alone": (last_mini_batch_alone, "actor/"),
}


@pytest.mark.parametrize("name", one_fast_in(len(LIES), LIES))
def test_metrics_that_lie(playground: Playground, monkeypatch: Patch, name: str) -> None:
    """huggingface/trl#6380."""
    plant, metric = LIES[name]
    more = ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)
    found(
        playground,
        monkeypatch,
        plant,
        *more,
        says=rf"found \(metrics\): the metric {metric}.*curves",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    one_fast_in(5, ["advantage", "score", "acc", "response", "reward_parts"], others=BY_HAND),
)
def test_rows_of_the_samples_file_that_are_another_samples(
    playground: Playground, monkeypatch: Patch, name: str
) -> None:
    """huggingface/trl#6380."""

    def rows(batch: Batch) -> list[dict[str, object]]:
        found = step_metrics.sample_rows(batch)
        return [{**row, name: other[name]} for row, other in zip(found, found[::-1], strict=True)]

    monkeypatch.setattr(audit_metrics, "sample_rows", rows)
    with pytest.raises(
        TrustError,
        match=rf"step 1 found \(samples\): the samples file has .* as the {name} of sample",
    ):
        playground.run("grpo", *STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss"), [("entropy", "vanilla"), ("ppo_kl", "vanilla"), ("cov_selected", "clip_cov")]
)
def test_metrics_that_lie_within_an_update(
    playground: Playground, monkeypatch: Patch, name: str, loss: str
) -> None:
    """huggingface/trl#6809."""
    original = PolicyObjective.finish

    def finish(self: PolicyObjective, sums: Any, counts: Any) -> dict[str, float]:
        metrics = original(self, sums, counts)
        return metrics | {name: 1.1 * metrics[name] + 0.01}

    monkeypatch.setattr(PolicyObjective, "finish", finish)
    with pytest.raises(
        TrustError, match=rf"step 1 found \(loss\): the {name} of a mini-batch .* reported"
    ):
        keys = (
            "actor_rollout_ref.actor.ppo_epochs=2",
            f"actor_rollout_ref.actor.policy_loss={loss}",
        )
        playground.run("grpo", *STEPS, *keys)


def whole_batch_if_uneven(batch: Batch) -> None:
    """The advantages of a step whose groups have different numbers of scores are over the whole
    step."""
    scores = batch["token_level_rewards"].sum(-1)
    valid = batch["valid"].bool()
    spread = (scores - scores[valid].mean()) / (scores[valid].std() + 1e-6)
    batch["advantages"] = spread[:, None] * batch["loss_mask"]


@pytest.mark.slow
def test_groups_mixed(playground: Playground, monkeypatch: Patch) -> None:
    """THUDM/slime#2230, #1414."""
    playground.write_reward(UNEVEN)
    plant = plant_behind("calculate_advantages", whole_batch_if_uneven)
    found(
        playground, monkeypatch, plant, says=r"found \(advantages\): .*the rewards of its own group"
    )


UNEVEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    value = sum(map(ord, solution_str))
    if value % 5 == 0:
        raise RuntimeError("no answer")
    return value % 7 / 6
"""


@pytest.mark.slow
def test_advantages_of_other_samples_in_a_micro_batch(
    playground: Playground, monkeypatch: Patch
) -> None:
    """tenstorrent/tt-metal#46548."""

    def plant(patch: Patch) -> None:
        call = PolicyObjective.__call__

        def called(self: PolicyObjective, outputs: Any, micro: Batch, counts: Any) -> Any:
            micro = micro.only(micro.names)
            micro["advantages"] = micro["advantages"].roll(1, dims=0)
            return call(self, outputs, micro, counts)

        patch.setattr(PolicyObjective, "__call__", called)

    found(playground, monkeypatch, plant, says="another sample's advantage")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "says"), [(0.0, "goes on, though it is > 0"), (2.0, "ends, though it is not > 2")]
)
def test_a_condition_that_is_turned_round(
    playground: Playground, monkeypatch: Patch, bound: float, says: str
) -> None:
    """`trainer.stop_when`; without the fault the first run ends after a step, the second goes
    on."""
    keys = ("trainer.total_training_steps=2", f"trainer.stop_when=reward/mean_score > {bound}")
    run = playground.run("grpo", *keys, name="healthy")
    assert run.outcome.steps == (1 if bound == 0.0 else 2) and run.notes("error") == []
    holds = StopCondition.holds
    monkeypatch.setattr(StopCondition, "holds", lambda self, value: not holds(self, value))
    with pytest.raises(TrustError, match=f"after step 1 reward/mean_score is .*{says}"):
        playground.run("grpo", *keys)


@pytest.mark.slow
def test_an_adapter_that_begins_without_the_seed(
    playground: Playground, monkeypatch: Patch
) -> None:
    keys = ("trainer.total_training_steps=1", "actor_rollout_ref.model.lora_rank=4")
    assert playground.run("grpo", *keys, name="healthy").notes("error") == []
    seeds = iter(range(100, 200))

    class Torch:
        """Seeds that nobody chose."""

        def __getattr__(self, name: str) -> Any:
            return (
                (lambda seed: torch.manual_seed(next(seeds)))
                if name == "manual_seed"
                else getattr(torch, name)
            )

    monkeypatch.setattr(lora, "torch", Torch())
    with pytest.raises(
        TrustError, match=r"found \(weights\): .* does not begin with the weights that trainer.seed"
    ):
        playground.run("grpo", *keys)


@pytest.mark.slow
def test_tokens_of_responses_alone_in_the_ledger(
    playground: Playground, monkeypatch: Patch
) -> None:
    original = group_tasks.finished_group

    def finished(group: PromptGroup, batch: Batch, measured: Any) -> Any:
        return replace(
            original(group, batch, measured), num_tokens=int(batch.lengths("response").sum())
        )

    monkeypatch.setattr(group_tasks, "finished_group", finished)
    with pytest.raises(
        TrustError, match=r"the ledger have \d+ tokens for group 0, but its samples have \d+"
    ):
        playground.run("grpo", "trainer.total_training_steps=1")


@pytest.mark.slow
def test_a_checkpoint_that_is_due_and_not_written(
    playground: Playground, monkeypatch: Patch
) -> None:
    is_due = Timetable.is_due

    def due(self: Timetable, step: int, num_passed: int, is_last: bool = False) -> bool:
        return is_due(self, step, num_passed, is_last) and step != 4

    monkeypatch.setattr(Timetable, "is_due", due)
    with pytest.raises(
        TrustError,
        match="the checkpoint after step 4 is due by trainer.save_freq, but was not written",
    ):
        playground.run("grpo", "trainer.save_freq=2", "trainer.total_training_steps=6")


ZERO_OR_ONE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 2)
"""
FILTER = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.mean_range=[0.25,0.75]",
    *STEPS,
)


@pytest.mark.slow
def test_a_group_at_the_bound_of_the_filter(playground: Playground, monkeypatch: Patch) -> None:
    playground.write_reward(ZERO_OR_ONE)
    assert playground.run("grpo", *FILTER, name="healthy").notes("error") == []
    right = rollout_reward_filter.drop_reason

    def drop_reason(metric: torch.Tensor, valid: Any = None, mean_range: Any = None) -> str | None:
        return (
            right(metric, valid, None)
            if float(metric.mean()) in mean_range
            else right(metric, valid, mean_range)
        )

    monkeypatch.setattr(rollout_reward_filter, "drop_reason", drop_reason)
    with pytest.raises(
        TrustError, match=r"was kept, but its mean acc is 0\.(25|75), outside mean_range"
    ):
        playground.run("grpo", *FILTER)


@pytest.mark.slow
def test_groups_that_are_counted_as_dropped_for_another_reason(
    playground: Playground, monkeypatch: Patch
) -> None:
    playground.write_reward(ZERO_OR_ONE)
    right = group_tasks.DroppedGroup
    other = {"all_equal": "too_few_scores"}
    monkeypatch.setattr(
        group_tasks,
        "DroppedGroup",
        lambda group, reason, *more, **named: right(
            group, other.get(reason, reason), *more, **named
        ),
    )
    with pytest.raises(
        TrustError, match=r"0 groups are counted as dropped for all_equal .*but nodes dropped \d+"
    ):
        playground.run("grpo", *FILTER)


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["", UNEVEN])
def test_the_same_runs_without_a_fault(playground: Playground, reward: str) -> None:
    if reward:
        playground.write_reward(reward)
    run = playground.run("grpo", *STEPS, *MICROS, "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    assert run.notes("finding") == run.notes("error") == []
    assert all("reward errors" in warning for warning in run.notes("warning"))
