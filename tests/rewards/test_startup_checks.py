"""Verifiers are tried on known cases before a run: planted faults are named."""

import asyncio
from dataclasses import replace

import pytest

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.errors import UserError
from distflow.rewards.startup_checks import (
    known_cases,
    run_startup_checks,
    startup_check_scores,
)
from tests.rewards.routers import make_router

NOT_KNOWN = (CUSTOM_REWARD, "judge", "model")  # their cases
BUILTIN = [name for name in REWARDS if name not in NOT_KNOWN]
SETTINGS = {"timeout_s": 20.0, "num_workers": 1, "max_response_length": 100}


@pytest.mark.slow
def test_every_built_in_has_good_and_bad_cases_and_passes_them():
    assert all(len({case.expected for case in known_cases(name)}) > 1 for name in BUILTIN)
    with make_router({"default": [(name, 1.0) for name in BUILTIN]}, **SETTINGS) as router:
        asyncio.run(run_startup_checks(router))


@pytest.mark.parametrize(
    "body",
    ["return 1.0", "return 0.0", "raise ValueError('broken install')", "import os; os._exit(1)"],
)
def test_a_verifier_that_judges_wrongly_is_named(tmp_path, monkeypatch, body):
    cases = "from distflow.rewards.math.reward import CASES\n"
    (tmp_path / "broken.py").write_text(f"{cases}def compute_score(solution_str):\n    {body}\n")
    monkeypatch.setitem(
        REWARDS, "math", replace(REWARDS["math"], target=f"{tmp_path / 'broken.py'}:compute_score")
    )
    refused = pytest.raises(RuntimeError, match="'math'")
    with make_router({"default": [("math", 1.0)]}, **SETTINGS) as router, refused:
        asyncio.run(run_startup_checks(router))


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
