"""`code` on real programs in the real sandbox: right, wrong, broken, and those that cheat."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from distflow.builtin_names import PROMPT_MESSAGES
from distflow.rewards.code.case_formats import StreamTests
from distflow.rewards.code.execution import Stopped, TimedSandbox, run_streams
from distflow.rewards.code.reward import compute_score, compute_share, score_program
from distflow.rewards.pool.pool import PoolSettings, RewardPool
from distflow.rewards.reward_results import due_within, left_s
from distflow.sandbox.interface import SandboxFault
from distflow.sandbox.local_sandbox import Sandbox
from tests.patience import at_some_deadline, is_running, wait_until
from tests.rewards.routers import pids_of

SHARED = Path(__file__).parents[4] / "shared" / "data"
DOUBLE = {"fn_name": "f", "inputs": [[i] for i in range(8)], "outputs": [2 * i for i in range(8)]}
FEW = ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 6"]
LINES = {"inputs": ["1\n2\n", "3\n4\n"], "outputs": ["3\n", "7\n"]}
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n"
KINDS = {"calls": DOUBLE, "assertions": FEW, "check": CHECK}


def fenced(program):
    return f"```python\n{program}\n```"


def judge(program, tests, **row):
    return compute_score("", fenced(program), tests, {"entry_point": "f", **row})


@pytest.mark.parametrize("tests", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("def f(x): return 2 * x", 1.0),
        ("f = lambda x: x + x", 1.0),
        ("class Solution:\n    def f(self, x): return 2 * x", None),
        ("from __future__ import annotations\ndef f(x: Any): return 2 * x", 1.0),
        (
            "import sys\nMEMO = {}\ndef f(x):\n    print(x)\n    return MEMO.setdefault(x, 2 * x)",
            1.0,
        ),
        ("def f(x): return 2 * x if x != 1 else 3", None),
        ("def f(x): return str(2 * x)", 0.0),
        ("def f(x): return [2 * x]", 0.0),
        ("def g(x): return 2 * x", 0.0),
        ("def f(x): return 2 * x +", 0.0),
        ("def f(x): raise KeyError(x)", 0.0),
        ("raise KeyError('x')", 0.0),
        ("def f(x): return 1 / 0", 0.0),
        ("", 0.0),
        ("x = '\ud800'\ndef f(x): return 2 * x", 0.0),
        ("\x00def f(x): return 2 * x", 0.0),
    ],
)
def test_a_function(program, share, tests):
    reward_result = judge(program, tests)
    if share is not None:
        assert reward_result["share"] == share
    assert reward_result["score"] == reward_result["acc"] == float(reward_result["share"] == 1.0)
    assert bool(reward_result["failed"]) == (reward_result["share"] < 1.0)


@pytest.mark.parametrize(
    ("program", "share", "why"),
    [
        ("print(int(input()) + int(input()))", 1.0, None),
        ("import sys\nprint(sum(map(int, sys.stdin)))\nexit()", 1.0, None),
        ("if __name__ == '__main__':\n    print(sum(int(input()) for _ in range(2)))", 1.0, None),
        ("print(3)", 0.5, "it printed '3\\n', expected '7\\n'"),
        ("print(input() + input())", 0.0, "it printed '12\\n', expected '3\\n'"),
        ("print(int(input()) + int(input()))\nexit(1)", 0.0, "it ended by exit, status 1"),
        ("print(int(input()) +", 0.0, "SyntaxError"),
        ("[input() for _ in range(3)]", 0.0, "EOFError"),
    ],
)
def test_a_program_with_standard_input(program, share, why):
    reward_result = judge(program, LINES)
    assert reward_result["share"] == share
    assert why is None or why in reward_result["failed"][0]["why"]


def test_who_fails_is_told_which_case_why_and_what_was_printed():
    failed = judge("def f(x):\n    print('got', x)\n    return 2 if x == 1 else x", FEW)["failed"]
    assert failed == [
        {"case": "assert f(2) == 4", "why": "it returned 2", "printed": "got 2"},
        {"case": "assert f(3) == 6", "why": "it returned 3", "printed": "got 3"},
    ]
    assert judge("def f(x): return {}[x]", FEW)["failed"][0]["why"] == "it raised KeyError: 1"
    assert judge("def f(x) return 3", FEW)["failed"] == [
        {
            "case": "3 of 3 cases",
            "why": "not passed: it raised SyntaxError: expected ':' (program.py, line 1)",
            "printed": "",
        }
    ]
    assert compute_score("", "```cpp\nint f();\n```", FEW)["failed"][0]["why"] == (
        "not passed: the response has no program in Python"
    )


def test_the_share_can_be_paid():
    program = fenced("def f(x): return 2 * x if x < 3 else 0")
    reward_result = compute_share("", program, FEW)
    assert (reward_result["score"], reward_result["acc"]) == (2 / 3, 0.0)
    assert compute_share("", fenced("def f(x): return 2 * x"), FEW)["score"] == 1.0


REPLAY = "from itertools import count\nn = count()\ndef f(x): return {}[next(n)]"
CHEATS = {
    "a number with its own operators": "class N(float):\n    __eq__ = lambda s, o: True\n"
    "    __sub__ = lambda s, o: 0\n"
    "def f(x): return N(0)",
    "a list with its own": "class L(list):\n    __eq__ = lambda s, o: True\ndef f(x): return L()",
    "a lazy iterator": "def f(x): return iter([2 * x])",
    "what is imported": (
        "import sys, math\nsys.modules['math'] = sys.modules['random'] = None\ndef f(x): return 0"
    ),
    "a thread": (
        "import threading, os\ndef f(x):\n    threading.Timer(0.01, os._exit, [0]).start()\n"
        "    return 0"
    ),
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "a verdict": "def f(x):\n    print('[\"passed\"]', flush=True)\n    return ['passed']",
    "an object equal to all": "class All:\n    __eq__ = lambda s, o: True\ndef f(x): return All()",
    "an int equal to all": (
        "class All(int):\n    __eq__ = lambda s, o: True\ndef f(x): return All()"
    ),
    "exit": "import os\nos._exit(0)",
    "exit when asked": "import sys\ndef f(x): sys.exit(0)",
    "an answer of its own": (
        "import os\nos.write(3, b'\\0' * 8 + b'\\0\\0\\0\\x0c{\"value\": 2}')\ndef f(x): return 0"
    ),
    "a built-in": "import builtins\nbuiltins.AssertionError = KeyError\ndef f(x): return 0",
    "the frames above": (
        "import sys\ndef f(x):\n    return sys._getframe(1).f_locals.get('expected')"
    ),
    "the harness": (
        "import gc\ndef f(x):\n    return [o for o in gc.get_objects() if 'assert' in str(o)][0]"
    ),
    "an assertion": "def f(x): raise AssertionError",
    "replay": REPLAY.format([2, 4, 6]),
}


@pytest.mark.parametrize("tests", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_who_cheats_gets_nothing(program, tests):
    assert judge(program, tests)["score"] == 0.0


def test_an_order_that_is_remembered_is_of_no_use():
    assert judge(REPLAY.format([0, 2, 4, 6, 8, 10, 12, 14]), DOUBLE)["score"] == 0.0
    many = [f"assert f({i}) == {2 * i}" for i in range(8)]
    assert judge(REPLAY.format([0, 2, 4, 6, 8, 10, 12, 14]), many)["score"] == 0.0
    long = "for i in range(20):\n    assert f(i) == 2 * i\n"
    assert judge(REPLAY.format([2 * i for i in range(20)]), [long])["score"] == 0.0
    assert judge("def f(x): return 2 * x", [long])["score"] == 1.0
    loop = "for i in range(4):\n    assert f(i) == 2 * i\n"
    assert judge(REPLAY.format([0, 2, 4, 6]), [loop])["score"] == 0.0
    assert judge("def f(x): return 2 * x", [loop])["score"] == 1.0


def test_a_program_does_not_change_what_the_tests_mean():
    close = ["assert abs(f(1) - 2) < 1e-6", "assert round(f(2)) == 4", "assert len([f(3)]) == 1"]
    program = "def abs(x): return 0\ndef round(x): return 4\ndef f(x): return 7"
    assert judge(program, close)["share"] == 1 / 3
    assert judge("def sum(x, y): return x + y", ["assert sum(1, 2) == 3"])["score"] == 1.0


# test ## what a right program returns ## what a wrong one returns, which may be equal to Python
TYPES = r"""
assert f(1) == 1 ## 1.0 ## True
assert f(1) == True ## True ## 1
assert f(1) == [3] ## [3.0] ## [complex(3, 0)]
assert f(1) == 0 ## -0.0 ## False
x = [1, 2]; assert f(1) == x[0] ## 1 ## True
assert 1 == f(1) ## 1 ## True
x = {1: (2,)}; assert f(1) == x ## {1: (2,)} ## {True: (2,)}
assert 0 < f(1) == 1 ## 1.0 ## '1'
assert f(1) in (1, 2) ## 2 ## True
assert f(1) not in (1, 2) ## 3 ## True
assert abs(f(1) - 1) < 1e-6 ## 1 + 1e-9 ## True
assert f(1) in range(1, 5) ## 1 ## True
assert 0.9 < f(1) < 1.1 ## 1 ## True
assert abs(f(1)) == 1 ## -1 ## True
import math; assert math.isclose(f(1), 1) ## 1.0 ## True
from math import isclose; assert isclose(1, f(1), rel_tol=1e-6) ## 1 ## True
import math; assert math.hypot(*f(1)) == 5 ## [3, 4] ## [5, 1]
import unittest; unittest.TestCase().assertEqual(f(1), [1]) ## [1] ## [True]
import unittest; unittest.TestCase().assertAlmostEqual(f(1), 1) ## 1.0 ## True
assert f(1) * 1 == 1 ## 1 ## True
assert f(1) * 2 == 2 ## 1.0 ## True
assert 5 + f(1) == 6 ## 1 ## True
assert f(1) / 2 == 0.5 ## 1 ## True
assert f(1) // 1 == 1 ## 1 ## True
assert f(1) ** 2 == 1 ## 1 ## True
assert 4 % f(1) == 0 ## 1 ## True
assert -f(1) == -1 ## 1 ## True
assert +f(1) == 1 ## 1 ## True
assert ~f(1) == -2 ## 1 ## True
assert 1 << f(1) == 2 ## 1 ## True
assert f(1) | 0 == 1 ## 1 ## True
assert 'ab' * f(1) == 'ab' ## 1 ## True
assert [7] * f(1) == [7] ## 1 ## True
n = 1; n += f(1); assert n == 2 ## 1 ## True
x = [1]; y = x; y += f(1); assert x == [1, 2] ## [2] ## [True]
x = f(1); x[0] += 1; assert x == [2, 2] ## [1, 2] ## [True, 2]
assert sum(f(1)) == 3 ## [1, 2] ## [True, 2]
assert sum(f(1), 1) == 3 ## iter([1, 1]) ## [True, 2]
assert [10, 20][f(1)] == 20 ## 1 ## True
assert 'ab'[f(1):] == 'b' ## 1 ## True
assert {1: 'a'}[f(1)] == 'a' ## 1 ## True
assert {True: 'a'}[f(1)] == 'a' ## True ## 2
assert not f(1) != 1 ## 1 ## True
assert f(1) != 1 ## 2 ## True
assert not [f(1)] != [1] ## 1 ## True
assert {1: 'a'}.get(f(1)) == 'a' ## 1 ## True
assert {True: 'a'}.get(f(1), 'b') == 'a' ## True ## 2
assert f(1).__eq__(1) ## 1 ## True
assert [f(1), 0] > [0, 5] ## 1 ## True
assert [0, 1].index(f(1)) == 1 ## 1 ## True
assert f(1).count(1) == 2 ## [1, 1, 0] ## [1, True, 0]
assert list(range(f(1))) == [0] ## 1 ## True
import operator; assert operator.eq(f(1), 1) ## 1 ## True
import operator; assert not operator.ne(f(1), 1) ## 1 ## True
from operator import eq; assert all(map(eq, f(1), [1, 2])) ## [1, 2] ## [True, 2]
import operator as o; assert o.add(f(1), 1) == 2 ## 1 ## True
import functools, operator; assert functools.reduce(operator.mul, f(1)) == 6 ## [2, 3, 1] ## [2, 3, True]
assert (f(1) > 0) + (f(1) > 1) == 1 ## 1 ## 3
assert f(1) & (f(2) == f(1)) ## True ## False
assert '%s' % f(1) == 'True' ## True ## 1
assert f(1) == f(2) == True ## True ## False
assert f(1) == [True] != f(2) ## [x == 1] ## [True]
assert [*map(int, f(1))] == [1, 0] ## [True, False] ## [False, True]
m = {(1, 2): 3}; assert m[1, f(1)] == 3 ## 2 ## 1
assert f(1) == 0.3 ## 0.1 + 0.2 ## 0.3001
assert f(1) == 0.1 + 0.2 ## 0.3 ## 0.31
assert f(1) == {'a': [0.3, 1]} ## {'a': [0.1 + 0.2, 1]} ## {'a': [0.1 + 0.2, 1.001]}
assert f(1) in (0.3, 7) ## 0.1 + 0.2 ## 0.4
assert list(f(1)) == [0, 1, 2] ## range(3) ## range(4)
assert f(1) == range(3) ## range(3) ## [0, 1, 2]
assert f(1) == [0, 1] ## [0, 1] ## range(2)
assert len(f(1)) == 2 and sorted(f(1)) == ['a', 'b'] ## {'b': 1, 'a': 2}.keys() ## {'b': 1}.keys()
assert f(1) == {'a', 'b'} ## {'b': 1, 'a': 2}.keys() ## ['a', 'b']
assert set(f(1)) == {1, 2} ## {'b': 1, 'a': 2}.values() ## {'b': 1, 'a': 3}.values()
assert dict(f(1)) == {'a': [1]} ## {'a': [1]}.items() ## {'a': [True]}.items()
from collections import deque; assert f(1) == deque([1]) ## __import__('collections').deque([1]) ## [1]
assert list(f(1)) == [1] ## __import__('collections').deque([1]) ## __import__('collections').deque([True])
assert next(f(1)) + next(f(2)) == 0 ## iter(range(3)) ## iter([False])
assert abs(f(1) - 3) < 1e-6 ## 3.0 ## complex(3, 0)
assert not abs(f(1) - 3) > 1e-6 ## 3 ## float('nan')
assert max(abs(x - 3) for x in f(1)) < 1e-6 ## [3, 3] ## [3, float('nan')]
assert not abs(f(1) / f(1) - 1) > 1e-6 ## 3 ## float('inf')
assert not f(1) * f(1) - f(1) * f(1) > 1e-6 ## 3.0 ## 1e200
assert f(1) == float('inf') ## float('inf') ## 10 ** 400
import math; assert math.isnan(f(1)) ## float('nan') ## 0.0
assert sum(f(x) for x in (1, 2)) == 2 ## True ## [1]
assert f(1) is True ## True ## 1
assert f(1) is not False ## True ## False
assert type(f(1)) is bool and isinstance(f(1), bool) ## True ## 1
import unittest; unittest.TestCase().assertIs(f(1), True) ## True ## 1
import json; assert json.dumps({'a': f(1)}) == '{"a": true}' ## True ## 1
assert sorted(f(1)) == [False, True] and max(f(1)) ## [True, False] ## [True, 0]
assert f(f(1)) == True ## x is True or x == 1 ## x == 1 and x is not True
assert f(1) is None ## None ## 0
assert not f(1) ## 0 ## '0'
assert f(1) ## [0] ## []
assert f(1) == (1, 2) ## (1, 2) ## [1, 2]
assert f(1) == {1, 2} ## {2, 1} ## [1, 2]
assert f(1) == {'a': (1,)} ## {'a': (1,)} ## {'a': [1]}
assert f(1) != f(1) ## float('nan') ## 1.0
assert isinstance(f(1), float) ## 1.0 ## 1
assert f(1) == 10 ** 5000 ## 10 ** 5000 ## 10 ** 4999
assert f(1) == b'a' ## b'a' ## 'a'
assert sorted(f(1)) == [1, 2] ## [2, 1] ## None
assert sorted(f(1)) == [1, 2] ## (y for y in (2, 1)) ## iter([1, 3])
assert list(f(1)) == [0] ## map(int, '0') ## iter([False])
assert f(1) == [1] ## type('L', (list,), {})([1]) ## iter([1])
assert not abs(next(f(1)) - 3) > 1e-6 ## iter([3]) ## iter([float('nan')])
from itertools import islice; assert list(islice(f(1), 2)) == [5, 6] ## __import__('itertools').count(5) ## []
assert f(1) == 1 ## type('N', (int,), {})(1) ## type('N', (int,), {'__eq__': lambda a, b: True})(2)
"""  # noqa: E501


@pytest.mark.parametrize("case", TYPES.strip().splitlines())
def test_types_are_exact(case):
    test, right, wrong = case.split(" ## ")
    assert judge(f"def f(x): return {right}", [test])["score"] == 1.0
    assert judge(f"def f(x): return {wrong}", [test])["score"] == 0.0


@pytest.mark.parametrize(
    ("outputs", "right", "wrong"),
    [
        ([[0, 1, 2]], "range(3)", "range(2)"),
        ([["a"]], "{'a': 1}.keys()", "{'b': 1}.keys()"),
        (
            [[1, 2]],
            "__import__('collections').deque([1, 2])",
            "__import__('collections').deque([1, True])",
        ),
        ([[2, 4]], "map(int, '24')", "(x for x in [2])"),
        ([0.3], "0.1 + 0.2", "0.30001"),
        ([[[]]], "[[]]", "[]"),
        ([[None]], "[None]", "None"),
        ([[[[]]]], "[[[]]]", "[[]]"),
        ([[[None]]], "[[None]]", "[None]"),
        ([[5]], "5", "6"),
    ],
)
def test_what_stands_for_a_list_of_json(outputs, right, wrong):
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": outputs}
    assert judge(f"def f(x): return {right}", tests)["score"] == 1.0
    assert judge(f"def f(x): return {wrong}", tests)["score"] == 0.0


def test_bools_may_be_counted():
    assert (
        judge("def f(x): return x % 2 == 0", ["assert sum(map(f, range(4))) == 2"])["score"] == 1.0
    )


def test_an_error_of_a_class_of_ones_own_is_what_it_inherits_from():
    program = "class Own({}): pass\ndef f(x): raise Own('x')"
    test = (
        "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n"
        "    assert str(error) == 'x'"
    )
    assert [
        judge(program.format(kind), [test])["score"] for kind in ("ValueError", "KeyError")
    ] == [1.0, 0.0]


def test_a_test_may_change_what_it_got():
    test = "for i in range(3):\n    got = f(i)\n    got.append(9)\n    assert got == [i, 9]"
    assert judge("def f(x): return [x]", [test])["score"] == 1.0
    assert judge("def f(x): return [x, 9]", [test])["score"] == 0.0


SWALLOWED = {
    "by map": "assert all(map(f, [1, 2]))",
    "by an iterator": "assert list(iter(f, 3)) == []",
    "by a test beside a handler": (
        "try:\n    int('x')\nexcept ValueError:\n    pass\nassert all(map(f, [1, 2]))"
    ),
    "by iteration": (
        "class Each:\n    def __getitem__(self, i):\n        return f(i)\nassert all(Each())"
    ),
    "by `in`": (
        "class Each:\n    def __getitem__(self, i):\n        return f(i)\nassert 9 not in Each()"
    ),
    "by hasattr": (
        "class Held:\n    x = property(lambda self: f(1))\nassert not hasattr(Held(), 'x')"
    ),
    "by getattr": (
        "class Held:\n    x = property(lambda self: f(1))\nassert getattr(Held(), 'x', 3) == 3"
    ),
}


@pytest.mark.parametrize("test", SWALLOWED.values(), ids=SWALLOWED)
@pytest.mark.parametrize(
    "error", ["StopIteration", "IndexError", "AttributeError", "KeyError", "GeneratorExit"]
)
def test_an_error_that_no_handler_gets_is_a_failure(test, error):
    assert judge(f"def f(x): raise {error}", [test])["score"] == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "try:\n    f(1)\nexcept ValueError:\n    x = 1\nassert x == 1",
        (
            "import contextlib\nwith contextlib.suppress(ValueError):\n    f(1)\n    assert False\n"
            "assert True == True"
        ),
        "import unittest\nunittest.TestCase().assertRaises(ValueError, f, 1)\nassert f",
        "import unittest\nwith unittest.TestCase().assertRaises(ValueError):\n    f(1)\nassert f",
        "def g():\n    try:\n        return f(1)\n    except ValueError as e:\n"
        "        raise KeyError from e\n"
        "try:\n    g()\nexcept KeyError:\n    x = 1\nassert x == 1",
    ],
)
def test_an_error_that_a_test_handles_is_expected(test):
    assert judge("def f(x): raise ValueError('so')", [test])["score"] == 1.0
    assert judge("def f(x): return 1", [test])["score"] == 0.0 or "suppress" not in test


HELPED = """import math

def twice(x):
    'It helps.'
    return 2 * x

def f(x: int) -> float:
    'Solve twice(f(x)) = x.'
"""
INVERSE = (
    "def check(candidate):\n    for x in (1, 2, 3):\n"
    "        assert math.fabs(twice(candidate(x)) - x) < 1e-9\n"
)


@pytest.mark.parametrize(
    "row", [{"prompt": HELPED}, {PROMPT_MESSAGES: [{"content": f"Complete this.\n\n{HELPED}"}]}]
)
def test_a_program_does_not_replace_the_helpers_of_its_tests(row):
    own = "import math\ndef twice(x): return 2 * x\ndef f(x): return x / 2"
    assert judge(own, INVERSE, **row)["score"] == 1.0

    for cheat in (
        "twice = f = lambda x: x",
        "class math:\n    fabs = lambda x: 0.0\ndef f(x): return 0.0",
    ):
        assert judge(cheat, INVERSE, **row)["score"] == 0.0


def test_assertions_may_expect_an_error_or_draw():
    raises = "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(4) == 2"
    assert (
        judge("def f(x): return int(x ** 0.5 + (1 // 0 if x < 0 else 0))", [raises])["score"] == 0.0
    )
    assert judge("import math\ndef f(x): return math.isqrt(x)", [raises])["score"] == 1.0
    drawn = (
        "import random\nfor _ in range(20):\n    x = random.random()\n"
        "    assert abs(f(x) - 2 * x) < 1e-9"
    )
    assert judge("def f(x): return x + x", [drawn])["score"] == 1.0
    assert judge("def f(x): return 2 * x + 1e-8", [drawn])["score"] == 0.0


def test_a_completion_of_the_prompt_and_what_the_prompt_imports():
    prompt = (
        "from typing import List\n\ndef helper(x): return x\n\ndef f(x: int) -> int:\n"
        "    '''Double x.'''\n"
    )
    row = {"entry_point": "f", "prompt": prompt}

    for answer in (
        "    return helper(x) * 2",
        fenced("return helper(x) * 2"),
        fenced("    return 2 * x"),
    ):
        assert compute_score("", answer, CHECK, row)["score"] == 1.0

    whole = fenced("def f(x: List) -> int:\n    return 2 * x")
    assert (
        compute_score("", whole, CHECK, row)["score"]
        == compute_score("", whole, CHECK, {"entry_point": "f"})["score"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("def f(x):\n    while True: pass", "ran out of time"),
        ("while True: pass", "ran out of time"),
        ("import time\ndef f(x): time.sleep(100)", "ran out of time"),
        ("def f(x): return [0] * 10 ** 9", "memory"),
        (
            (
                "def f(x):\n    s = 'x' * 10 ** 6\n    for _ in range(1000): print(s)\n"
                "    return 2 * x"
            ),
            "printed more than",
        ),
        ("def f(x): return 'x' * 10 ** 8", "at most"),
        ("def f(x): return f(x)", "RecursionError"),
        ("import os\ndef f(x): os.fork()", "PermissionError"),
        (f"def f(x): return 2 * x\n# {'x' * 10**6}", None),
    ],
)
def test_a_program_that_takes_too_much_is_wrong_and_no_error(program, why):
    def check(deadline_s: float) -> None:
        with due_within(deadline_s):
            reward_result = judge(program, FEW)
            assert left_s() > 0
        assert reward_result["score"] == float(why is None)
        assert why is None or why in reward_result["failed"][0]["why"]

    at_some_deadline(check, 3.0, 30.0)


@pytest.mark.parametrize(
    "tests",
    [
        ["assert f(1) == 2", "x = ("],
        ["assert f(1) ==  2", "assert undefined.value == 3", "return 3"],
        ["x = 1 / 0", "assert f(1) == 2"],
        ["assert len(3) == f(1)"],
        ["import sys\nsys.exit()\nassert f(1)"],
        ["assert f(lambda: 1) == 2"],
        ["assert f(int) == 2"],
        ["while True: pass\nassert f(1)"],
        ["x = 3"],
    ],
)
@pytest.mark.parametrize("program", ["def f(x): return 2", "def f(x) return"])
def test_broken_tests_are_errors_and_no_wrong_answer(tests, program):
    if program.endswith("return") and "f(1) ==" in tests[0]:
        return  # nothing of them is run for a program that cannot be
    with pytest.raises(ValueError, match="tests are broken: "):
        judge(program, tests)


@pytest.mark.slow
def test_tests_that_an_answer_upsets_are_failed():
    assert (
        "the test did not end"
        in judge("def f(x): return 1", ["x = f(1)\nwhile x: pass\nassert x"])["failed"][0]["why"]
    )

    for depth in range(94, 104):  # at the edge of what is plain
        nested = f"def f(x):\n    v = []\n    for _ in range({depth}): v = [v]\n    return v"
        assert judge(nested, ["assert len(f(1)) == 2"])["score"] == 0.0
        assert judge(nested, ["assert f([f(1)]) == 2"])["score"] == 0.0

    assert (
        "TypeError" in judge("def f(x): return None", ["assert len(f(1)) == 1"])["failed"][0]["why"]
    )


def test_a_sandbox_that_does_not_work_is_an_error():
    sandbox = Sandbox()
    sandbox.close()
    with pytest.raises(SandboxFault):
        list(run_streams(TimedSandbox(sandbox, 5.0), "print(3)", StreamTests(("",), ("3",))))


def test_no_case_goes_on_when_the_program_has_used_up_the_time():
    with Sandbox() as sandbox:
        asleep = StreamTests(("", "x"), ("", ""))
        outcomes = run_streams(
            TimedSandbox(sandbox, 3.0),
            "import sys, time\nif sys.stdin.read(): time.sleep(60)",
            asleep,
        )
        assert next(outcomes).why == ""
        with pytest.raises(Stopped, match="out of time$"):
            next(outcomes)


def test_a_verdict_that_ran_short_takes_nothing_from_the_next():
    with Sandbox() as sandbox:
        limits = sandbox.limits
        with due_within(3.0):
            assert score_program(sandbox, fenced("while True: pass"), FEW, {})["score"] == 0.0
            assert score_program(sandbox, fenced("while True: pass"), LINES, {})["score"] == 0.0

        assert sandbox.limits == limits
        slow = "import time\ntime.sleep(1)\ndef f(x): return 2 * x"
        assert score_program(sandbox, fenced(slow), FEW[:1], {})["score"] == 1.0


def test_a_time_that_is_up_without_the_program_having_used_it_is_no_wrong_answer():
    with Sandbox() as sandbox, pytest.raises(TimeoutError, match="reward.timeout_s"):
        list(run_streams(TimedSandbox(sandbox, 0.0), "print(3)", StreamTests(("",), ("3",))))


def test_the_order_of_the_cases_is_the_same_for_the_same_program():
    program = "def f(x): return 2 * x if x % 2 else 0"
    assert len({json.dumps(judge(program, DOUBLE)["failed"]) for _ in range(3)}) == 1


def test_a_method_of_a_class():
    program = "class Solution:\n    def f(self, x: List[int]) -> int: return 2 * x"
    assert judge(program, {**DOUBLE, "fn_name": "Solution().f"})["score"] == 1.0
    assert judge(program, CHECK, entry_point="Solution().f")["score"] == 1.0


def kill_children(pid):
    """And wait until they are dead."""
    children = [
        int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]
    assert children

    for child in children:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda child=child: not is_running(child), "it is dead")


@pytest.mark.slow
def test_through_the_pool_an_endless_program_is_wrong_and_a_dead_sandbox_is_replaced():
    answers = [
        fenced("while True: pass"),
        fenced("def f(x): return 2 * x"),
        fenced("def f(x): return 2 * x"),
    ]
    pool = RewardPool(
        PoolSettings(
            {"code": "distflow.rewards.code.reward:compute_score"}, num_workers=1, timeout_s=60.0
        )
    )

    def check(deadline_s: float) -> None:
        reward_results = []
        for answer, within_s in zip(answers, (deadline_s, 60.0, 60.0), strict=True):
            arguments = {
                "data_source": "",
                "solution_str": answer,
                "ground_truth": FEW,
                "extra_info": {},
            }
            reward_results.append(asyncio.run(pool.call("code", arguments, within_s)))
            (worker,) = pids_of(pool)
            kill_children(worker)

        assert [
            getattr(reward_result, "value", reward_result) for reward_result in reward_results
        ] == [0.0, 1.0, 1.0]
        assert "ran out of time" in str(reward_results[0].extra["failed"])

    try:
        at_some_deadline(check, 3.0, 30.0)
    finally:
        pool.close()


def rows(name, number):
    return [json.loads(line) for line in (SHARED / name).read_text().splitlines()[:number]]


@pytest.mark.skipif(not SHARED.exists(), reason="wants the data sets in ../shared/data")
def test_reference_solutions_pass():
    human = rows("humaneval.jsonl", 20)
    assert all(compute_score("", row["canonical_solution"], None, row)["score"] for row in human)

    # whose tests hand over a type
    mbpp = [row for row in rows("mbpp_trainval.jsonl", 40) if row["task_id"] != 533]
    assert all(
        compute_score("", fenced(row["code"]), row["test_list"], row)["score"] for row in mbpp
    )


def test_the_program_that_ran_and_how_long_it_took_are_told():
    slow = "import time\ndef f(x):\n    time.sleep(0.3)\n    return 2 * x"
    told = compute_score(
        "",
        f"first\n{fenced('x = 1')}\nthen\n{fenced(slow)}",
        {**DOUBLE, "inputs": [[1]], "outputs": [2]},
    )
    assert told["program"].strip() == slow and 0.3 <= told["seconds"] < 60
    huge = compute_score(
        "", fenced("x = 1\n" * 100_000), {**DOUBLE, "inputs": [[1]], "outputs": [2]}
    )
    assert len(huge["program"]) < 5000 and huge["score"] == 0
    assert compute_score("", "```ruby\nputs 1\n```", FEW)["program"] is None
