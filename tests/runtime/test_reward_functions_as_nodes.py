"""Rewards in the signatures of other systems: one sample at a time, async ones too, or a whole
batch."""

import asyncio
from typing import Any

import pytest
import torch

from distflow.graph import NodeOutput
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.user_calls import PlainCalls
from distflow.runtime.run_errors import UserNodeError
from tests.runtime.groups import context, group, group_with_responses, step


def judged(function: Any, **settings: Any) -> Group:
    on = group_with_responses()
    asyncio.run(
        step(function, node_role="REWARD", **settings).on_group(
            on, context(group=on), PlainCalls(), 10.0
        )
    )
    return on


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=1.0):  # type: ignore[no-untyped-def]
    assert solution_str == ground_truth and data_source == "default"
    return {"score": bonus + extra_info["row"], "why": "it is"}


async def compute_score_async(data_source, solution_str, ground_truth, extra_info, bonus=1.0):  # type: ignore[no-untyped-def]
    await asyncio.sleep(0)
    return compute_score(data_source, solution_str, ground_truth, extra_info, bonus)["score"]


class Scorer:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info, bonus=1.0):  # type: ignore[no-untyped-def]
        return await compute_score_async(data_source, solution_str, ground_truth, extra_info, bonus)


@pytest.mark.parametrize("function", [compute_score, compute_score_async, Scorer()])
def test_the_reward_of_one_sample(function):
    assert judged(function)["scores"].tolist() == [1.0, 2.0]  # type: ignore[attr-defined]
    batch = judged(function, bonus=3.0).batch()
    assert batch["token_level_rewards"].tolist() == [[0, 3, 0, 0], [0, 0, 0, 4]]
    assert batch["token_level_scores"].tolist() == batch["token_level_rewards"].tolist()


def test_the_reward_of_one_sample_in_the_training_loop():
    out, _ = step(compute_score, node_role="REWARD")(group(), context())
    assert out["scores"].tolist() == [1.0, 2.0]
    assert out["token_level_rewards"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 2]]


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), None, "1", {"points": 1}])
def test_a_reward_that_is_no_finite_number_is_the_user_s_error(answer):
    def compute_score(data_source, solution_str, ground_truth):  # type: ignore[no-untyped-def]
        return answer if solution_str == "r1" else 1.0

    with pytest.raises(UserNodeError, match="'x' .* sample 1 .* returned"):
        judged(compute_score)


def test_the_reward_of_a_whole_batch_may_be_as_wide_as_the_sequence():
    """Other systems give rewards of the attention mask's shape, with the score anywhere in the
    row."""

    def compute_custom_reward(batch, config, **kwargs):  # type: ignore[no-untyped-def]
        wide = torch.zeros(batch["attention_mask"].shape)
        wide[:, -1] = torch.tensor([float(len(prompt)) for prompt in batch["prompts"]])
        batch["token_level_scores"] = batch["token_level_rewards"] = wide * kwargs["times"]
        return NodeOutput(batch, {"mine": 1.5}, weight=7.0)

    on = judged(compute_custom_reward, times=2.0)
    assert set(on.written) == {"scores"} and on.measured == [({"mine": 1.5}, 7.0)]
    assert on.batch()["token_level_scores"].tolist() == [[0, 2, 0, 0], [0, 0, 0, 2]]


def test_the_reward_of_a_whole_batch_may_be_one_for_each_response_token():
    def compute_custom_reward(batch, config, **kwargs):  # type: ignore[no-untyped-def]
        assert batch["index"].tolist() == [0, 0] and batch["data_source"] == ["default"] * 2
        return {
            "token_level_scores": batch["response_mask"],
            "token_level_rewards": batch["response_mask"] / 2,
        }

    batch = judged(compute_custom_reward).batch()
    assert batch["scores"].tolist() == [2.0, 4.0]
    assert batch["token_level_rewards"].sum().item() == 3.0


def test_two_scores_for_a_sample_and_no_batch_at_all_are_refused():
    def two(batch, config, **kwargs):  # type: ignore[no-untyped-def]
        wide = torch.ones(batch["attention_mask"].shape)
        return {"token_level_scores": wide, "token_level_rewards": wide * 2}

    def none(batch, config, **kwargs):  # type: ignore[no-untyped-def]
        return None

    for function, words in (
        (two, "token_level_rewards other than token_level_scores"),
        (none, "NoneType"),
    ):
        with pytest.raises(UserNodeError, match=f"'x' returned {words}"):
            judged(function)


@pytest.mark.parametrize(
    ("returned", "right"), [({"score": 0.3, "acc": True}, 1.0), ({"score": 0.3}, 0.3), (0.5, 0.5)]
)
def test_how_right_a_response_is_where_a_reward_says_so_and_else_its_score(returned, right):
    def compute_score(data_source, solution_str, ground_truth):  # type: ignore[no-untyped-def]
        return returned

    assert judged(compute_score)["acc"].tolist() == pytest.approx([right] * 2)  # type: ignore[attr-defined]
