"""The rows' own answers must score as right before a run."""

import asyncio

import pytest

from distflow.errors import UserError
from distflow.rewards.startup_checks import startup_check_scores
from tests.rewards.routers import make_router

SETTINGS = {"timeout_s": 20.0, "num_workers": 1, "max_response_length": 100}


def test_answers_that_are_no_ground_truth_are_found_before_the_run():
    with make_router(
        {"default": [("math", 1.0)], "text": [("exact_match", 1.0)]}, **SETTINGS
    ) as router:
        good = [
            ("default", "4+4=8\n#### 8", {}),
            ("default", r"\frac{1}{2}", {}),
            ("default", 63.0, {}),
            ("text", "Paris", {}),
        ]
        asyncio.run(startup_check_scores(router, good))
        asyncio.run(startup_check_scores(router, [*good, ("default", None, {})]))

        with pytest.raises(UserError, match="2 of 3 .*'default' .*data.answer_key"):
            asyncio.run(
                startup_check_scores(
                    router, [("default", None, {}), ("default", {"a": 1}, {}), ("default", "7", {})]
                )
            )
