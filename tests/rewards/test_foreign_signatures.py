"""Rewards of TRL, taken as they are, in the processes of a run."""

import asyncio
import json

import pytest

from distflow.builtin_names import PROMPT_CHAT
from distflow.data.sample import Sample, Segment
from distflow.rewards.function_calls import PROMPT
from distflow.rewards.function_loading import find_fault, with_answer_key
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_results import Error, RewardResult, Score
from tests.rewards.routers import make_router

SOURCE = """
import re

def columns(completions, solution, **kwargs):  # TRL, open-r1
    assert kwargs["level"] == [3] * len(completions) and len(kwargs["prompts"]) == len(completions)
    return [float(text == truth) for text, truth in zip(completions, solution)]

def chat(prompts, completions, **kwargs):  # TRL, conversational
    asked = [messages[-1]["content"] for messages in prompts]
    return [len(one[0]["content"]) + len(text) / 10 for one, text in zip(completions, asked)]

async def some(completions, weight=0.5, **kwargs):  # TRL: None says that the function does not apply
    return [None if text == "skip" else weight for text in completions]

def wants_more(completions, no_such_column, **kwargs):
    return [0.0]

def too_few(completions, **kwargs):
    return [0.0]

async def one_number(completions, **kwargs):
    return 0.5
"""  # noqa: E501
NAMES = (
    "columns",
    "chat",
    "some",
    "wants_more",
    "too_few",
    "one_number",
)
MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "foreign.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def pool(file):
    targets = {name: with_answer_key(f"{file}:{name}", {}, "solution") for name in NAMES}
    targets["weighted"] = with_answer_key(f"{file}:some", {"weight": 0.25}, "solution")
    pool = RewardPool(PoolSettings(targets, num_workers=1, timeout_s=60.0))
    yield pool
    pool.close()


def ask(pool: RewardPool, name: str, *texts: str, **extra: object) -> list[RewardResult]:
    info = {"level": 3, **extra}
    asked = {"data_source": "d", "ground_truth": "7", "extra_info": info, PROMPT: "p"}
    return asyncio.run(pool.score_group(name, [{**asked, "solution_str": text} for text in texts]))


def test_trl_gets_completions_and_columns_as_lists(pool):
    assert ask(pool, "columns", "7", "8") == [Score(1.0), Score(0.0)]
    assert ask(pool, "chat", "ab", "abcd", **{PROMPT_CHAT: MESSAGES}) == [Score(2.3), Score(4.3)]
    assert {"columns", "chat", "some"} <= pool.takes_batches


def test_an_option_of_the_part_is_its_argument(pool):
    assert ask(pool, "some", "x") == [Score(0.5)] and ask(pool, "weighted", "x", weight=9) == [
        Score(0.25)
    ]


def test_errors_say_what_is_offered(pool):
    (missing,), (form,) = ask(pool, "wants_more", "a"), ask(pool, "chat", "a")
    assert (
        isinstance(missing, Error)
        and "'no_such_column'" in missing.reason
        and "level" in missing.reason
    )
    assert (
        isinstance(form, Error)
        and "with data.prompt_format=chat both are messages) (at foreign.py:" in form.reason
    )


@pytest.mark.parametrize(("name", "what"), [("too_few", "a list of 1"), ("one_number", "0.5")])
def test_a_wrong_number_of_scores_names_the_function(pool, name, what):
    line = next(i for i, text in enumerate(SOURCE.split("\n"), 1) if f"def {name}" in text)
    first, second = ask(pool, name, "a", "b")
    assert first == second and isinstance(first, Error)
    assert (
        f"it returned {what} for 2 responses" in first.reason
        and f"(at foreign.py:{line})" in first.reason
    )


def test_none_leaves_the_response_out_of_that_function(file):
    """As TRL's nansum does; where all functions return None there is no score."""
    functions = {
        "default": [("exact_match", 2.0), (f"{file}:some", 1.0)],
        "alone": [(f"{file}:some", 1.0)],
    }

    def sample(response: str, domain: str) -> Sample:
        segments = [Segment("prompt", (1,)), Segment("environment", (1,))]
        return Sample(
            "0-0", 0, segments, response=response, ground_truth="skip", domain=domain, extra_info={}
        )

    with make_router(functions, timeout_s=60.0, num_workers=1, max_response_length=8) as router:
        samples = [
            sample("skip", "default"),
            sample("x", "default"),
            sample("skip", "alone"),
            sample("x", "alone"),
        ]
        skipped, scored, alone, other = asyncio.run(router(samples))

    assert (skipped.reward_result, skipped.accuracy, scored.reward_result) == (
        Score(2.0),
        1.0,
        Score(0.5),
    )
    assert (skipped.scores(), scored.scores()) == (
        {"exact_match": 1.0},
        {"exact_match": 0.0, f"{file}:some": 0.5},
    )
    assert isinstance(alone.reward_result, Error) and "None" in alone.reward_result.reason
    assert other.reward_result == Score(0.5)


@pytest.mark.parametrize("name", ["completion_ids", "trainer_state"])
def test_what_nothing_is_passed_for_is_refused_by_name(name):
    function = eval(f"lambda completions, {name}: 0")
    assert f"takes '{name}'" in find_fault(function) and "default" in find_fault(function)
    assert find_fault(eval(f"lambda completions, {name}=None: 0")) == ""


def test_a_chat_of_a_data_set_is_messages_in_the_reward_check(tmp_path, capsys):
    from distflow import cli

    (tmp_path / "own.py").write_text(
        "def f(completions, label, **kwargs):\n"
        "    return [float(one[0]['content'].split()[-1:] == [truth]) for one, truth in "
        "zip(completions, label)]\n"
    )
    rows = [
        {"prompt": [{"role": "user", "content": "?"}], "label": str(number)} for number in (5, 6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data", str(tmp_path / "rows.jsonl"), "--answer-key", "label", "--workers", "1"]
    cli.main(["reward", "check", f"{tmp_path}/own.py:f", *data])
    said = capsys.readouterr().out
    assert "alone 2" in said and " 0 errors" in said
