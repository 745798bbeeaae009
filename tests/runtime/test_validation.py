"""What validation says: accuracies by domain, pass@k against counting, responses without a
score."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from distflow.checks.group_records import GroupRecords
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import Sample
from distflow.graph import Drop, node
from distflow.rollout.engine import SamplingParams, Stream
from distflow.runtime.compiled_node import compile_steps
from distflow.runtime.node_context import Contexts, NodeContext
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.group_tasks import GroupEvents, RolloutLoop
from distflow.runtime.spec import ValidationSet
from distflow.runtime.validation import Validator
from distflow.runtime.validation_loss import validation_loss
from distflow.runtime.validation_results import ValidationResults
from distflow.scheduling.group_states import PromptGroup
from tests.runtime.groups import bound, group, samples, waiting_group

GREEDY, SAMPLED = SamplingParams(4, greedy=True), SamplingParams(4)


@dataclass
class Row:
    domain: str
    tag: str = ""


def rows(*domains: str) -> list[Row]:
    return [Row(domain) for domain in domains]


def answers(score: Callable[[PromptGroup, int], float | None]) -> Callable[..., object]:
    """Scores by group and sample; None: no score."""

    async def answer(
        chosen: ValidationSet, prompt_group: PromptGroup, params: SamplingParams
    ) -> Batch | Drop:
        found = [score(prompt_group, i) for i in range(prompt_group.group_size)]
        batch = group(
            prompt_group.group_id,
            (1,) * prompt_group.group_size,
            tuple(s is not None for s in found),
        )
        batch["acc"] = torch.tensor([s or 0.0 for s in found])

        return batch

    return answer


def run(
    chosen: ValidationSet, answer: Callable[..., object]
) -> tuple[dict[str, float], list[dict[str, object]]]:
    class Answers(Validator):
        _respond = staticmethod(answer)  # type: ignore[assignment]

    # it answers by itself
    validator = Answers([chosen], None, None, (), 9, print)  # type: ignore[arg-type]
    whole = asyncio.run(validator.run(7))
    parts = [asyncio.run(validator.run(7, part, 2)) for part in range(2)]
    assert ValidationResults.joined(parts).metrics() == whole.metrics()

    return whole.metrics(), whole.rows


def test_sampled_responses_stand_in_where_none_is_greedy_and_powers_of_two_end_at_n():
    chosen = ValidationSet("val", rows("default"), None, SAMPLED, 3)  # type: ignore[arg-type]
    metrics, _ = run(chosen, answers(lambda t, i: float(i == 0)))
    assert metrics["val_correct/all/mean"] == pytest.approx(1 / 3)
    assert [name for name in metrics if "pass@" in name] == [
        f"val_correct/all/pass@{k}" for k in (1, 2, 3)
    ]
    assert "val_correct/default/mean" not in metrics


def test_validation_prompts_are_run_as_they_are_to_be_by_the_nodes_that_validate():
    asked: list[tuple[Group, bool]] = []

    @node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
    async def answer(group: Group, ctx: NodeContext) -> list[Sample]:
        asked.append((group, ctx.validating))
        return samples(group.prompt_group.group_id, (1,) * len(group))

    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    def reward_fn(group: Group) -> list[float]:
        return [float(group.row.index == 1)] * len(group)

    @node(writes=(), role="DYNAMIC_SAMPLING", reads=("response_mask",))
    def drops(group: Group) -> Drop:
        return Drop("all_equal")

    parts = Resources(None, (3, 7), {}, 0)  # type: ignore[arg-type]  # no node reads the tokenizer
    contexts = Contexts(Config(), parts, {}, None)
    steps = compile_steps([bound(answer), bound(reward_fn), bound(drops)], {})
    plane = RolloutLoop(
        steps, waiting_group, contexts.for_rollout, None, 10.0, GroupEvents(), GroupRecords()
    )
    prompts = [PromptRow(i, (1, 2, 3), f"p{i}", "", "default", {}) for i in range(2)]
    chosen = ValidationSet("own", prompts, GREEDY, SAMPLED, 2)
    found = asyncio.run(Validator([chosen], contexts, plane, (3, 7), 9, print).run(5))
    metrics = found.metrics()
    rows = found.rows
    assert (
        metrics["val_correct/all/mean"] == metrics["val_correct/all/mean@2"] == 0.5
        and len(rows) == 6
    )
    assert [row["score"] for row in rows] == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert all(validating for _, validating in asked), "a fault drops no group here"
    drawn = [(group.params, group.stream, len(group)) for group, _ in asked]
    greedy, sampled = (replace(params, stop_token_ids=(3, 7)) for params in (GREEDY, SAMPLED))
    assert drawn == [(greedy, Stream(9, "val/own/greedy", 5, i), 1) for i in range(2)] + [
        (sampled, Stream(9, "val/own/sampled", 5, i), 2) for i in range(2)
    ]


def test_a_prompt_on_which_a_node_fails_costs_its_own_responses_only():
    @node(writes=("response_ids", "response_mask"), role="ROLLOUT", reads=("prompt_ids",))
    async def answer(group: Group) -> list[Sample]:
        return samples(group.prompt_group.group_id, (1,) * len(group))

    @node(writes="scores", role="REWARD", scope="group", reads=("response_mask",))
    def reward_fn(group: Group) -> list[float]:
        return [1.0 / group.row.index] * len(group)

    parts = Resources(None, (), {}, 0)  # type: ignore[arg-type]  # no node reads the tokenizer
    contexts = Contexts(Config(), parts, {}, None)
    steps = compile_steps([bound(answer), bound(reward_fn)], {})
    plane = RolloutLoop(
        steps, waiting_group, contexts.for_rollout, None, 10.0, GroupEvents(), GroupRecords()
    )
    prompts = [PromptRow(i, (1, 2, 3), f"p{i}", "", "default", {}) for i in range(2)]
    said: list[str] = []
    validator = Validator(
        [ValidationSet("own", prompts, GREEDY, None, 0)], contexts, plane, (), 9, said.append
    )
    found = asyncio.run(validator.run(5))
    metrics = found.metrics()
    rows = found.rows
    assert metrics == {"val_correct/all/mean": 0.5, "val/errors": 1.0} and len(rows) == 1
    assert (
        len(said) == 1
        and said[0].startswith("validation prompt 0 of 'own': ")
        and "division by zero" in said[0]
    )


def test_the_validation_loss_is_a_mean_over_the_responses_tokens():
    class Scorer:
        def forward(self, batch: Batch, wanted: tuple[str, ...]) -> Batch:
            assert wanted == ("log_probs",) and batch["response_ids"].tolist() == [
                [5, 0, 0],
                [6, 7, 8],
            ]
            out = batch.only(batch.names)
            out["log_probs"] = -batch.flat("response_ids").float()
            return out

    prompts = [
        PromptRow(i, (1,), "p", "", "default", {}, ids) for i, ids in enumerate(((5,), (6, 7, 8)))
    ]
    chosen = ValidationSet("val", prompts, None)
    metrics, rows = validation_loss([chosen], Scorer())  # type: ignore[arg-type]
    assert metrics == {"sft/val_loss": (5 + 6 + 7 + 8) / 4} and len(rows) == 2


def test_a_score_that_is_not_one_is_not_right():
    chosen = ValidationSet("val", rows("a", "a", "a"), GREEDY)  # type: ignore[arg-type]
    metrics, _ = run(chosen, answers(lambda t, i: (0.999, 1.0 - 1e-9, 1.5)[t.group_id]))
    assert metrics["val_correct/all/mean"] == pytest.approx(2 / 3)
