"""What a node's `ctx` offers: verdicts on samples, and mini-batches that no number of ranks changes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from distflow.config.errors import UserError
from distflow.data.batch import Batch
from distflow.data.sample import Sample
from tests.runtime.groups import answered_group, context, group

TICKETS = (3, 4, 6, 7, 9)


class Router:
    async def __call__(self, samples: Sequence[Sample]) -> list[str]:
        return [sample.uid for sample in samples]


def test_the_judge_is_asked_about_samples_or_a_batch_that_stands_for_all_of_the_group_s() -> None:
    answered = answered_group(5)
    ctx = context(group=answered, router=Router())
    assert asyncio.run(ctx.judge(answered.samples[1:])) == ["5-1"]  # type: ignore[comparison-overlap]
    assert asyncio.run(ctx.judge(answered.batch())) == ["5-0", "5-1"]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("given", [{}, {"router": Router()}, {"group": answered_group()}])
def test_without_verifiers_the_judge_says_how_to_get_some(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="a parameter `judge`"):
        asyncio.run(context(**given).judge([]))


def parts(owned: Sequence[int], step: int = 0, epoch: int = 0) -> list[list[int]]:
    """The tickets of each mini-batch of two groups, on a rank that has these groups."""
    ctx = context(step, tickets=TICKETS)
    batch = Batch.concat([group(number) for number in owned])
    return [part["group_index"].tolist() for part in ctx.minibatches(batch, 2, epoch)]


def test_the_mini_batches_of_all_ranks_together_are_those_of_one() -> None:
    alone = parts(TICKETS)
    assert [len(part) for part in alone] == [4, 4, 2]
    assert sorted(row for part in alone for row in part) == sorted(TICKETS * 2)
    for one, other in (((3, 9), (4, 6, 7)), ((7,), (3, 4, 6, 9))):
        together = [sorted(a + b) for a, b in zip(parts(one), parts(other), strict=True)]
        assert together == [sorted(part) for part in alone]


def test_each_epoch_and_step_has_an_order_of_its_own() -> None:
    orders = [parts(TICKETS, step, epoch) for step in range(3) for epoch in range(3)]
    assert len({str(order) for order in orders}) > 3 and parts(TICKETS) == orders[0]
