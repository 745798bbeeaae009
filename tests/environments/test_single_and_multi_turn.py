"""The built-in workflow of several turns, against an engine that says what it is told to."""

import asyncio

import pytest

from distflow.environments.chat import Limits, Prompt
from distflow.environments.single_and_multi_turn import multi_turn
from distflow.environments.workflows import Row
from distflow.rewards.reward_results import Score
from distflow.rewards.router import RewardOutcome
from tests.environments.test_chat import FAMILIES, Engine, chat_of


@pytest.mark.parametrize(
    ("response", "turns", "score"),
    [(1000, 3, 0.25), (5, 2, 0.5), (4, 1, 1.0)],  # the feedback has two tokens, each reply two but the last one
)
def test_the_discount_counts_the_turns_that_had_room(response: int, turns: int, score: float) -> None:
    chat = chat_of(FAMILIES["qwen2.5"](), Engine([[5, 6], [7, 8], [9]]), Limits(response, 2000))

    async def score_of(reply: object) -> RewardOutcome:
        return RewardOutcome(Score(1.0), {}, 0.0)

    row, chat.templated = Row(Prompt("ask", (1, 2))), False
    outcome = asyncio.run(multi_turn(chat, row, score_of, feedback="=?", turn_discount=0.5))
    assert isinstance(outcome, RewardOutcome) and outcome.reward_result == Score(score)
    assert sum(segment.owner == "policy" for segment in chat.segments) == turns
