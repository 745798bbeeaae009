"""Reference solutions of a data set: where they stand, and what a run is told of those that
fail."""

import asyncio

import pytest

from distflow.errors import UserError
from distflow.rewards.startup_checks import Solution, find_solution, try_solutions
from tests.rewards.routers import make_router

SETTINGS = {"timeout_s": 20.0, "num_workers": 2, "max_response_length": 100}
DEF = "def f(x):\n    return x + 1\n"
BODY = "    return x + 1\n"
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.mark.parametrize(
    ("names", "key", "answer", "row", "found"),
    [
        (["math", "code"], None, TESTS, {"code": DEF}, ("code", DEF)),
        (["code_share"], None, TESTS, {"solutions": [DEF, "no"], "other": "x"}, ("solutions", DEF)),
        (
            ["code"],
            None,
            TESTS,
            {"solutions": '["a = 1\\nb = 2", "no"]'},
            ("solutions", "a = 1\nb = 2"),
        ),
        (["code"], None, DEF, {"test_list": TESTS}, None),
        (["code"], "answer", DEF, {"test_list": TESTS}, ("answer", DEF)),
        (["code"], None, TESTS, {"code": "A-17"}, None),
        (["code"], "code", TESTS, {"code": "print(1)"}, ("code", "print(1)")),
        (["code"], "", TESTS, {"code": DEF}, None),
        (["code"], "mine", TESTS, {"code": DEF}, None),
        (["math"], None, "7", {"solution": "It is\n7"}, None),
        (["math"], "solution", "7", {"solution": "It is 7"}, ("solution", "It is 7")),
        (
            ["code"],
            None,
            TESTS,
            {"canonical_solution": BODY},
            ("canonical_solution", "def f(x):\n" + BODY),
        ),
        (
            ["code"],
            None,
            TESTS,
            {"canonical_solution": BODY, "prompt": "p"},
            ("canonical_solution", BODY),
        ),
    ],
)
def test_where_a_solution_stands(names, key, answer, row, found):
    assert find_solution(names, key, "answer", answer, row, "def f(x):\n") == found


def test_a_body_that_continues_no_prompt_is_left_alone():
    assert find_solution(["code"], None, "answer", TESTS, {"code": BODY}, "Write f.") == (
        "code",
        BODY,
    )


def tried(
    *programs,
    domain="default",
    tests=TESTS,
    seconds=60.0,
    functions=(("code", 1.0), ("format", 0.1)),
):
    solutions = [
        Solution(f"rows.jsonl:{i + 1}", domain, "code", program, tests, {})
        for i, program in enumerate(programs)
    ]
    with make_router({"default": functions}, **SETTINGS) as router:
        return asyncio.run(try_solutions(router, solutions, seconds))


def test_those_that_fail_are_listed_by_row_with_the_reason():
    assert tried(DEF, DEF) == []
    (warning,) = tried(DEF, "def f(x):\n    return 2\n", DEF, "def g(x):\n    pass\n", DEF)
    first, wrong, missing, *advice = warning.splitlines()
    assert first == "2 of 5 reference solutions of domain 'default' (column 'code') fail:"
    assert wrong.startswith("  rows.jsonl:2: code: 0, assert f(2) == 3: ")
    assert missing.startswith("  rows.jsonl:4: code: 0, ") and "NameError" in missing
    assert "--rows 0" in advice[0]


def test_where_most_fail_the_run_is_refused():
    with pytest.raises(UserError, match="2 of 3 (?s:.*)data.solution_key=''"):
        tried(DEF, "x = 1", "y = 2")


def test_tests_that_cannot_be_judged_are_no_pass():
    with pytest.raises(UserError, match=r"1 of 1 (?s:.*)rows.jsonl:1: code"):
        tried(DEF, tests=["assert f(1) =="])


def test_no_more_is_tried_than_there_is_time_for():
    assert tried("x = 1", "y = 2", seconds=-1.0) == []
