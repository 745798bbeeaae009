"""What validation says: accuracies by data source, pass@k against counting, answers without a verdict."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from distflow.data.batch import Batch
from distflow.flow.ticket import Ticket
from distflow.graph import Drop
from distflow.rollout.engine import SamplingParams
from distflow.runtime.spec import ValidationSet
from distflow.runtime.validation import pass_at_k, validate
from tests.runtime.groups import group

GREEDY, SAMPLED = SamplingParams(4, greedy=True), SamplingParams(4)


@dataclass
class Row:
    domain: str


def rows(*domains: str) -> list[Row]:
    return [Row(domain) for domain in domains]


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int) -> None:
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def answers(score: Callable[[Ticket, int], float | None]) -> Callable[..., object]:
    """Scores by ticket and sample; None: no verdict."""

    async def answer(chosen: ValidationSet, ticket: Ticket, params: SamplingParams) -> Batch | Drop:
        found = [score(ticket, i) for i in range(ticket.group_size)]
        batch = group(ticket.number, (1,) * ticket.group_size, tuple(s is not None for s in found))
        batch["token_level_scores"] = torch.tensor([[s or 0.0] for s in found])
        return batch

    return answer


def run(chosen: ValidationSet, answer: Callable[..., object]) -> tuple[dict[str, float], list[dict[str, object]]]:
    return asyncio.run(validate([chosen], answer, 7))  # type: ignore[arg-type]


def test_greedy_and_sampled_answers_by_data_source() -> None:
    right = {"val/val/greedy": {(0, 0), (2, 0)}, "val/val/sampled": {(0, 0), (0, 1), (2, 3)}}
    chosen = ValidationSet("val", rows("a", "a", "b"), GREEDY, SAMPLED, 4)  # type: ignore[arg-type]
    metrics, samples = run(chosen, answers(lambda t, i: float((t.number, i) in right[t.stream])))
    assert metrics == {
        "val_correct/all/mean": pytest.approx(2 / 3),
        "val_correct/a/mean": 0.5,
        "val_correct/b/mean": 1.0,
        "val_correct/all/mean@4": 0.25,
        "val_correct/all/pass@1": 0.25,
        "val_correct/all/pass@2": pytest.approx((5 / 6 + 0 + 3 / 6) / 3),
        "val_correct/all/pass@4": pytest.approx(2 / 3),
        "val/errors": 0.0,
    }
    assert [(s["set"], s["kind"]) for s in samples] == [("val", "greedy")] * 3 + [("val", "sampled")] * 12


def test_sampled_answers_stand_in_where_none_is_greedy_and_powers_of_two_end_at_n() -> None:
    chosen = ValidationSet("val", rows("default"), None, SAMPLED, 3)  # type: ignore[arg-type]
    metrics, _ = run(chosen, answers(lambda t, i: float(i == 0)))
    assert metrics["val_correct/all/mean"] == pytest.approx(1 / 3)
    assert [name for name in metrics if "pass@" in name] == [f"val_correct/all/pass@{k}" for k in (1, 2, 3)]
    assert "val_correct/default/mean" not in metrics


def test_an_answer_without_a_verdict_is_not_right_and_is_counted() -> None:
    chosen = ValidationSet("val", rows("a", "a"), GREEDY)  # type: ignore[arg-type]
    metrics, samples = run(chosen, answers(lambda t, i: None if t.number else 1.0))
    assert metrics["val_correct/all/mean"] == 0.5 and metrics["val/errors"] == 1.0
    assert len(samples) == 2

    async def dropped(*arguments: object) -> Drop:
        return Drop("error")

    metrics, samples = run(chosen, dropped)
    assert metrics["val_correct/all/mean"] == 0.0 and metrics["val/errors"] == 2.0 and samples == []


def test_a_score_that_is_not_one_is_not_right() -> None:
    chosen = ValidationSet("val", rows("a", "a", "a"), GREEDY)  # type: ignore[arg-type]
    metrics, _ = run(chosen, answers(lambda t, i: (0.999, 1.0 - 1e-9, 1.5)[t.number]))
    assert metrics["val_correct/all/mean"] == pytest.approx(2 / 3)
