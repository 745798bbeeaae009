"""What a verifier can know of the time that it has."""

import math

import pytest

from distflow.rewards.pool.worker import score_all
from distflow.rewards.reward_results import due_within, left_s


def test_the_time_that_is_left():
    assert left_s() == math.inf
    with due_within(5000.0):
        assert 4000.0 < left_s() <= 5000.0
        with pytest.raises(KeyError), due_within(1000.0):
            assert left_s() <= 1000.0
            raise KeyError
        assert 4000.0 < left_s() <= 5000.0

    assert left_s() == math.inf


def test_a_reward_has_the_time_of_all_that_are_judged_with_it():
    def seconds(solution_str: str) -> float:
        return left_s()

    def all_seconds(solution_strs: list[str]) -> list[float]:
        return [left_s()] * len(solution_strs)

    assert 6000.0 < score_all("r", seconds, [{"solution_str": "a"}], 7000.0)[0]["score"] <= 7000.0
    asked = [{"solution_str": "a"}, {"solution_str": "b"}]
    assert all(
        13000.0 < answer["score"] <= 14000.0
        for answer in score_all("r", all_seconds, asked, 7000.0)
    )
