"""Verifiers are tried on known cases before a run: planted faults are named."""

import asyncio

import pytest

from distflow.config.errors import UserError
from distflow.rewards import certify as certify_module
from distflow.rewards.certify import CASES, certify, certify_answers, certify_deadline
from distflow.rewards.functions import BUILTIN
from distflow.rewards.router import RewardRouter

SETTINGS = {"timeout_s": 20.0, "num_workers": 1}


def test_every_built_in_has_good_and_bad_cases_and_passes_them():
    assert set(CASES) == set(BUILTIN)
    assert all({case.good for case in cases} == {True, False} for cases in CASES.values())
    with RewardRouter({"default": [(name, 1.0) for name in BUILTIN]}, **SETTINGS) as router:
        asyncio.run(certify(router))


@pytest.mark.parametrize(
    "body", ["return 1.0", "return 0.0", "raise ValueError('broken install')", "import os; os._exit(1)"]
)
def test_a_verifier_that_judges_wrongly_is_named(tmp_path, monkeypatch, body):
    (tmp_path / "broken.py").write_text(f"def compute_score(solution_str):\n    {body}\n")
    monkeypatch.setitem(BUILTIN, "math", f"{tmp_path / 'broken.py'}:compute_score")
    refused = pytest.raises(RuntimeError, match="the verifier 'math' is not fit for use here")
    with RewardRouter({"default": [("math", 1.0)]}, **SETTINGS) as router, refused:
        asyncio.run(certify(router))


def test_a_hang_is_killed_at_its_deadline():
    asyncio.run(certify_deadline())


def test_a_machine_where_the_hang_is_not_killed_is_named(monkeypatch):
    monkeypatch.setattr(certify_module, "_HANG", "distflow.rewards.exact_match_reward:compute_score")
    with pytest.raises(RuntimeError, match="was not killed"):
        asyncio.run(certify_deadline())


def test_answers_that_are_no_ground_truth_are_found_before_the_run():
    with RewardRouter({"default": [("math", 1.0)], "text": [("exact_match", 1.0)]}, **SETTINGS) as router:
        good = [
            ("default", "4+4=8\n#### 8", {}),
            ("default", r"\frac{1}{2}", {}),
            ("default", 63.0, {}),
            ("text", "Paris", {}),
        ]
        asyncio.run(certify_answers(router, good))
        asyncio.run(certify_answers(router, [*good, ("default", None, {})]))
        with pytest.raises(UserError, match="2 of 3 answers of domain 'default' .*data.answer_key"):
            asyncio.run(
                certify_answers(router, [("default", None, {}), ("default", {"a": 1}, {}), ("default", "7", {})])
            )
