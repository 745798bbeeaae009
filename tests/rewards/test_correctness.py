"""Which part of a reward decides whether an answer is right, and that what is paid for it does
not."""

import asyncio

import numpy as np
import pytest

from distflow.data.sample import Sample, Segment
from distflow.rewards.reward_results import Score, accuracy, is_right, read_score
from tests.rewards.routers import make_router

REWARDS = """
def graded(solution_str): return 0.7 if "5" in solution_str else 0.2
def signed(solution_str): return {"score": 1.0 if "5" in solution_str else -1.0, "acc": "5" in solution_str}
def paid(solution_str): return {"score": 0.3 if "5" in solution_str else 0.9, "acc": "5" in solution_str, "why": "so"}
def points(solution_str): return 10 if "5" in solution_str else 0
def penalty(solution_str): return -0.4
def odd(solution_str): return {"score": 1.0, "acc": "yes"}
def silent(solution_str): return {"score": 1.0, "acc": None}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("parts", "weights", "expected"),
    [
        ({"math": 1.0}, {"math": 1.0}, 1.0),
        ({"math": 1.0}, {"math": 0.5}, 1.0),
        ({"math": 1.0, "format": 0.0}, {"math": 1.0, "format": 0.1}, 1.0),
        ({"math": 0.0, "format": 1.0}, {"math": 1.0, "format": 1.0}, 0.0),
        ({"format": 1.0, "math": 0.0}, {"format": 5.0, "math": 0.1}, 0.0),
        ({"format": 1.0}, {"format": 1.0}, 1.0),
        ({"custom": 0.7, "format": 1.0}, {"custom": 1.0, "format": 1.0}, 0.7),
        ({"custom": -0.4, "math": 1.0}, {"custom": 1.0, "math": 1.0}, 1.0),
        ({"length": -0.4, "custom": 1.0}, {"length": 0.2, "custom": 1.0}, 1.0),  # the larger weight
        # a penalty decides nothing
        ({"length": 1.0, "custom": 0.0}, {"length": -1.0, "custom": 0.1}, 0.0),
        # a part that is only measured neither
        ({"math": 1.0, "custom": 0.0}, {"math": 0.0, "custom": 1.0}, 0.0),
        ({"math": 1.0}, {"math": 0.0}, 1.0),  # unless there is no other
        # the first of equals
        ({"math": 1.0, "exact_match": 0.0}, {"math": 0.5, "exact_match": 0.5}, 1.0),
        ({"math": 1.0, "exact_match": 0.0}, {"math": 0.4, "exact_match": 0.6}, 0.0),
    ],
)
def test_the_part_that_compares_answers_decides(parts, weights, expected):
    assert accuracy({name: Score(value) for name, value in parts.items()}, weights) == expected


def test_a_function_that_says_how_right_it_is_decides_before_any_other():
    parts = {"math": Score(1.0), "custom": Score(0.9, {"acc": 0.0})}
    assert accuracy(parts, {"math": 1.0, "custom": 0.1}) == 0.0


def test_one_or_more_is_right():
    assert [is_right(value) for value in (1.0, 1.0 - 1e-9, 10.0, 0.999, 0.7, -1.0)] == [
        True
    ] * 3 + [False] * 3


@pytest.mark.parametrize("acc", [True, 1, np.bool_(True), np.float32(1.0), 1.0])
def test_what_a_function_says_of_itself_is_a_number(acc):
    score = read_score({"score": -0.5, "acc": acc})
    assert (score.value, score.extra) == (-0.5, {"acc": 1.0})


@pytest.mark.parametrize("acc", ["yes", float("nan"), [1.0]])
def test_else_it_is_no_verdict(acc):
    with pytest.raises(ValueError, match="'acc'"):
        read_score({"score": 1.0, "acc": acc})


def test_no_verdict_is_not_right(tmp_path):
    (tmp_path / "own.py").write_text(REWARDS)
    settings = {"timeout_s": 20.0, "num_workers": 1, "max_response_length": 100}
    with make_router(
        {"default": [("math", 1.0), (f"{tmp_path}/own.py:odd", 0.1)]}, **settings
    ) as router:  # type: ignore[arg-type]
        judgement = asyncio.run(router([answer(r"\boxed{5}", 1)]))[0]

    assert judgement.accuracy == 0.0 and "'yes' as 'acc', which is not a number" in str(
        judgement.reward_result
    )


def answer(text: str, num_tokens: int) -> Sample:
    segments = [Segment("prompt", (1,)), Segment("environment", (1,) * num_tokens)]
    return Sample("0-0", 0, segments, response=text, ground_truth="5")
