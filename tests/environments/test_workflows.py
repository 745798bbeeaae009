"""What is a workflow, what its result means, and the built-in one of several turns."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch

from distflow.data.encoded_prompts import PromptRow
from distflow.environments import workflow
from distflow.environments.builtin_workflows import multi_turn
from distflow.environments.chat import Limits, Prompt
from distflow.environments.workflows import (
    Row,
    load_workflow,
    row_of,
)
from distflow.errors import UserError
from distflow.pipelines.nodes.episode_outcome import read_outcome
from distflow.rewards.reward_results import AS_TEXT, Score
from distflow.rewards.router import RewardOutcome
from tests.environments.test_chat import FAMILIES, Engine, chat_of

FILE = """
class ByAReaL:
    def __init__(self, reward_fn):
        self.reward_fn = reward_fn

    async def arun_episode(self, engine, data):
        return None

class Old:
    def run_episode(self, engine, data):
        return None

made = ByAReaL(len)

class Fails:
    def __init__(self):
        raise RuntimeError("no game")

class Plain:
    def __call__(self, chat, row):
        return 1.0

def plain(chat, row):
    return 1.0

async def other(row, chat):
    return 1.0

NUMBER = 7
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ByAReaL", "argument: 'reward_fn'"),
        (
            "Old",
            "'Old' .* called: .* arun_episode",
        ),
        ("Fails", "cannot be constructed: RuntimeError: no game"),
        ("Plain", "'Plain' .* async function"),
        ("plain", "plain.* async function"),
        ("other", "must take `chat` and `row` first"),
        ("NUMBER", "is 7, "),
    ],
)
def test_what_is_no_workflow_is_refused(tmp_path, name, said):
    (tmp_path / "own.py").write_text(FILE)
    with pytest.raises(UserError, match=said):
        load_workflow(f"{tmp_path}/own.py:{name}", {})


@pytest.mark.parametrize("limit", [{"max_turns": 0}, {"max_turns": 1.5}, {"max_turns": True}])
@pytest.mark.parametrize("name", ["multi_turn", "tools", "environment"])
def test_limits_are_above_zero(name, limit):
    with pytest.raises(UserError, match=r"workflow_kwargs.max_turns=\S+: "):
        load_workflow(name, limit)


def test_a_timeout_is_above_zero():
    with pytest.raises(UserError, match="timeout_s=-1"):
        load_workflow(
            "by_domain",
            {"default": {"workflow": "tools", "tools": ["calculator"], "timeout_s": -1}},
        )


def test_areals_form_is_a_workflow_as_a_class_with_options_and_as_an_object(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    for name, options in (("ByAReaL", {"reward_fn": 1}), ("made", {})):
        loaded = load_workflow(f"{tmp_path}/own.py:{name}", options)
        assert loaded.name == name and not loaded.scores
    with pytest.raises(UserError, match="'made': .*'reward_fn'; .* none"):
        load_workflow(f"{tmp_path}/own.py:made", {"reward_fn": 1})


def test_the_decorator_refuses_at_once():
    with pytest.raises(UserError, match="@workflow: plain .* async"):

        @workflow
        def plain(chat: Any, row: Any) -> float:  # type: ignore[type-var]
            return 1.0


@pytest.mark.parametrize(
    ("returned", "value", "parts", "accuracy"),
    [
        (1, 1.0, {}, 1.0),
        (True, 1.0, {}, 1.0),
        (-0.5, -0.5, {}, -0.5),
        ({"found": True, "early": 0.25}, 1.25, {"found": 1.0, "early": 0.25}, 1.25),
        ({"score": 2, "found": 1}, 2.0, {"found": 1.0}, 2.0),
        ({"style": 0.5, "acc": 1}, 0.5, {"style": 0.5}, 1.0),
    ],
)
def test_scores(returned, value, parts, accuracy):
    outcome = read_outcome(returned)
    assert outcome is not None and outcome.reward_result == Score(value)
    assert outcome.scores() == parts and outcome.accuracy == accuracy


def test_values_beside_the_parts_stay_numbers_and_lists():
    extra = {"n": np.int64(3), "list": torch.ones(60), "none": None, "odd": object()}
    outcome = read_outcome({"found": np.float32(0.5), "extra": extra})
    assert outcome is not None and isinstance(outcome.reward_result, Score) and outcome.score == 0.5
    found = dict(outcome.reward_result.extra)
    assert isinstance(found.pop("odd"), str) and found.pop(AS_TEXT) == {"odd": "object"}
    assert found == {"n": 3, "list": [1.0] * 60, "none": None} and type(found["n"]) is int


def test_a_result_of_the_reward_functions_passes_and_none_rejects():
    outcome = RewardOutcome(Score(0.5), {}, 1.0)
    assert read_outcome(outcome) is outcome and read_outcome(None) is None


@pytest.mark.parametrize(
    "returned",
    [
        "seven",
        math.nan,
        math.inf,
        {},
        {"found": "yes"},
        {"a": math.nan},
        [1.0],
        object(),
        {"acc": 1.0},
        {"a": 1e308, "b": 1e308},
        {"a": 3e38, "b": 3e38},
        1e39,
        RewardOutcome(Score(0.5), {"part": Score(1e39)}, 0.5),
        RewardOutcome(Score(0.5)).discounted(math.nan),
        RewardOutcome(Score(1e308)).discounted(10.0),
        RewardOutcome(Score(0.5), {}, math.nan),
    ],
)
def test_anything_else_is_an_error(returned):
    with pytest.raises(ValueError, match="it returned"):
        read_outcome(returned)


@pytest.mark.parametrize(
    ("response", "turns", "score"),
    # the feedback has two tokens, each reply two but the last one
    [(1000, 3, 0.25), (5, 2, 0.5), (4, 1, 1.0)],
)
def test_the_discount_counts_the_turns_that_had_room(response, turns, score):
    chat = chat_of(FAMILIES["qwen2.5"](), Engine([[5, 6], [7, 8], [9]]), Limits(response, 2000))

    async def score_of(reply: object) -> RewardOutcome:
        return RewardOutcome(Score(1.0), {}, 0.0)

    row = Row(Prompt("ask", (1, 2)))
    chat.templated = False
    outcome = asyncio.run(multi_turn(chat, row, score_of, feedback="=?", turn_discount=0.5))
    assert isinstance(outcome, RewardOutcome) and outcome.reward_result == Score(score)
    assert sum(segment.owner == "policy" for segment in chat.segments) == turns


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}], "1+1="),
        (
            [
                {"role": role, "content": text}
                for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
            ],
            None,
        ),
    ],
)
def test_the_prompt_of_a_chat_is_its_text_without_the_template(messages, text):
    row = row_of(
        PromptRow(0, (1, 2), "<eos>user: 1+1=", extra_info={"prompt_chat": messages}),
        "prompt",
        "answer",
    )
    assert row.prompt == (text or "a\n\nb\n\nc") and [*row.prompt.messages] == messages
    assert row.prompt.token_ids == (1, 2) and row.columns["prompt"] == messages
