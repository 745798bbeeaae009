"""What rows of code data sets mean, and outputs that are the same."""

import json
from collections import deque

import pytest

from distflow.rewards.code.assertion_process import exact, rebuilt
from distflow.rewards.code.assertions import split_assertions
from distflow.rewards.code.case_formats import AssertTests, CallTests, StreamTests, read_tests
from distflow.rewards.code.execution import same_output, same_value
from distflow.sandbox.inside.program_messages import Values

PAIRS = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}
CALLS = {"fn_name": "f", "inputs": [[1, [2]], [3, [4]]], "outputs": [5, [6]]}
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3\n"


@pytest.mark.parametrize(
    ("ground_truth", "row"),
    [
        (PAIRS, {}),
        (json.dumps(PAIRS), {}),
        (None, PAIRS),
        (None, {"inputs": json.dumps(PAIRS["inputs"]), "outputs": json.dumps(PAIRS["outputs"])}),
        (None, {"input_output": json.dumps(PAIRS)}),
        (
            [
                {"input": "1\n", "output": "2\n", "testtype": "stdin"},
                {"input": "2\n", "output": "3\n"},
            ],
            {},
        ),
        (PAIRS, {"test_list": ["assert f(1)"]}),  # the answer comes before the columns
    ],
)
def test_streams(ground_truth, row):
    assert read_tests(ground_truth, row) == StreamTests(("1\n", "2\n"), ("2\n", "3\n"))


def test_streams_may_be_lines():
    assert read_tests({"inputs": [["1", "2"]], "outputs": [["3"]]}, {}) == StreamTests(
        ("1\n2",), ("3",)
    )


@pytest.mark.parametrize(
    ("ground_truth", "row"),
    [
        (CALLS, {}),
        ({**CALLS, "fn_name": "Solution().f"}, {}),
        ({"inputs": CALLS["inputs"], "outputs": CALLS["outputs"]}, {"fn_name": "f"}),
        # JSON of each argument
        ({"inputs": ["1\n[2]", "3\n[4]"], "outputs": ["5", "[6]"], "fn_name": "f"}, {}),
    ],
)
def test_calls(ground_truth, row):
    assert read_tests(ground_truth, row) == CallTests("f", ([1, [2]], [3, [4]]), (5, [6]))


def test_assertions():
    mbpp = AssertTests("assert f(1)\nassert f(2)", "x = 1")
    assert read_tests(["assert f(1)", "assert f(2)"], {"test_setup_code": "x = 1"}) == mbpp
    assert (
        read_tests(
            None, {"test_list": '["assert f(1)", "assert f(2)"]', "test_setup_code": "x = 1"}
        )
        == mbpp
    )
    human = AssertTests(CHECK, "", "f")
    assert (
        read_tests(
            "def f(x): return x",
            {"test_list": ["assert f(1)", "assert f(2)"], "test_setup_code": "x = 1"},
        )
        == mbpp
    )
    assert (
        read_tests(CHECK, {"entry_point": "f"})
        == read_tests(None, {"test": CHECK, "entry_point": "f"})
        == human
    )
    assert read_tests(CHECK, {"entry_point": "f", "prompt": "Write f."}) == human
    prompt = "import math\n\ndef f(x):\n    '''...'''\n"
    assert read_tests(CHECK, {"entry_point": "f", "prompt": prompt}) == AssertTests(
        CHECK, "", "f", prompt
    )


@pytest.mark.parametrize(
    ("ground_truth", "row", "message"),
    [
        (None, {}, "'code' needs tests"),
        ("", {"answer": "7"}, "'code' needs tests"),
        ("def f(x): return x", {}, "'code' needs tests"),
        ({"inputs": ["1"], "outputs": []}, {}, "1 'inputs' and 0 'outputs'"),
        ({"inputs": ["1"], "outputs": "2"}, {}, "must be lists"),
        ({"inputs": [1], "outputs": ["2"]}, {}, "1 is not text"),
        ({"inputs": [1], "outputs": [2], "fn_name": "f"}, {}, "1 is not a list"),
        ({"inputs": ["[1"], "outputs": ["2"], "fn_name": "f"}, {}, "are not JSON"),
        ({"inputs": ["1"], "outputs": ["[2"], "fn_name": "f"}, {}, "is not JSON"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f()"}, {}, "not a function name"),
        ({"input_output": "[1]"}, {}, "not a mapping"),
        ([{"input": "1"}], {}, "each needs 'input' and 'output'"),
        ([1], {}, "not a list of str"),
        (["assert f(1)"], {"test_setup_code": 3}, "not a str"),
        (["assert f(1)"], {"test_imports": [3]}, "not a list of str"),
        ({"test": 3}, {}, "not a str"),
        ({"test": CHECK}, {"entry_point": 3}, "not a function name"),
    ],
)
def test_tests_that_mean_nothing(ground_truth, row, message):
    with pytest.raises(ValueError, match=message):
        read_tests(ground_truth, row)


def test_assertions_are_split():
    split = split_assertions(
        AssertTests("x = 1\nassert f(x) == g\nassert True\nassert f(2)", "import math")
    )
    assert split.shown == ("assert f(x) == g", "assert f(2)")
    assert split.cases == (
        "import math\nx = 1\nassert f(x) == g",
        "import math\nx = 1\nassert f(2)",
    )
    assert split.names == {"f": "f", "g": "g"}


def test_those_of_a_check_too():
    split = split_assertions(AssertTests("M = {}\n" + CHECK + "check(f)", "", "f"))
    assert split.shown == ("assert candidate(1) == 2", "assert candidate(2) == 3")
    assert [case.count("assert") for case in split.cases] == [1, 1] and split.names == {
        "candidate": "f"
    }


def test_assertions_in_a_loop_stay_together():
    split = split_assertions(AssertTests("for i in range(3):\n    assert f(i)\nassert f(9)"))
    assert len(split.cases) == 1 and split.shown == ("all assertions",)


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("assert abs(f(1)) < len([1])", ["f"]),  # what is built in stays what it is
        ("assert sum(1, 2) == 3", ["sum"]),  # unless nothing else can be meant
        ("assert f(1) == math.pi", ["f"]),  # a module that the program is to import
        ("from math import pi\nh = 3\nassert [f(x) for x in (h, pi)]", ["f"]),
        ("def g(x):\n    return f(x)\nassert g(1)", ["f"]),
    ],
)
def test_names_that_stand_for_the_program(code, names):
    assert list(split_assertions(AssertTests(code)).names) == names


@pytest.mark.parametrize(
    ("code", "args", "right", "wrong"),
    [
        (
            "assert f(1, [2.5, 'a'], x={'b': None}) == (-4,)",
            ([1, [2.5, "a"]], {"x": {"b": None}}),
            (-4,),
            [-4],
        ),
        ("'text'\nM = {'a': 1}\nassert f((1, 2)) == {1, 2}, 'so'", ([(1, 2)], {}), {2, 1}, [1, 2]),
        ("assert f() == 1", ([], {}), 1.0, True),
        ("assert f() == [{'a': 1}]", ([], {}), [{"a": 1}], [{"a": True}]),
        ("assert (f(1) == 1)", ([1], {}), 1.0, 2),
    ],
)
def test_assertions_of_literals(code, args, right, wrong):
    (literal,) = split_assertions(AssertTests(code)).literals
    assert literal is not None and literal.name == "f" and (literal.args, literal.kwargs) == args
    typed = [rebuilt(value, exact) for value in (right, literal.wanted, wrong)]
    assert typed[0] == typed[1] != typed[2]


def test_those_of_a_check_are_of_its_entry():
    check = "def check(g):\n    assert g(1) == 2\n    assert helper(3) == 4\n"
    assert [each.name for each in split_assertions(AssertTests(check, "", "f")).literals] == [
        "f",
        "helper",
    ]


@pytest.mark.parametrize(
    ("code", "setup"),
    [
        ("assert f(x) == 1", ""),
        ("assert f(1) == g(1)", ""),
        ("assert f(*[1]) == 1", ""),
        ("assert f(**{'a': 1}) == 1", ""),
        ("assert f(1) != 1", ""),
        ("assert f()", ""),
        ("assert not f()", ""),
        ("assert f() is True", ""),
        ("x = y = 3\nassert f() == 1", ""),
        ("assert f(1) == 1 == 1", ""),
        ("assert f(f(1)) == 1", ""),
        ("assert f(1) == 1, f(2)", ""),
        ("assert len(f(1)) == 1", ""),
        ("x = g(1)\nassert f(1) == 1", ""),
        ("x = {}\nx['a'] = 1\nassert f(1) == 1", ""),
        ("assert f(1) == 1", "import math"),
        ("assert f(1) == 1", "1 / 0"),
        ("for x in (1, 2):\n    assert f(1) == 1", ""),
    ],
)
def test_assertions_that_must_be_run(code, setup):
    assert split_assertions(AssertTests(code, setup)).literals == (None,)


@pytest.mark.parametrize(
    "code", ["assert f(1", "assert 1 == 1", "x = 3", "assert f(" + "(" * 5000 + ")" * 5000 + ")"]
)
def test_tests_that_are_broken(code):
    with pytest.raises(ValueError, match="tests are broken: "):
        split_assertions(AssertTests(code))


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1  2 \n\n", "1 2", True),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("2.50", "2.5", True),
        ("0.3333333", "0.33333333", True),
        ("0.333", "0.33333333", False),
        ("1000000.5", "1000000.1", True),
        ("3.0", "3", True),
        ("3.0000001", "3", False),
        ("0", "0.0000005", False),
        ("0.00000050000001", "5e-7", True),
        ("1e-17", "0.0", True),
        ("0.0000005", "0.00", False),
        ("12345678901234567891.0", "12345678901234567890", False),
        ("12345678901234567890.0", "12345678901234567890", True),
        ("9007199254740993", "9007199254740992.0", True),
        ("-0.0", "0", True),
        ("03", "3", False),
        ("3", "03", False),
        ("0010", "10", False),
        ("00", "0", False),
        ("0", "00", False),
        ("1e3", "1000", False),
        ("1000", "1e3", False),
        ("+5", "5", False),
        ("-7.0", "-7", True),
        ("1e+20", "100000000000000000000.0", True),
        ("1e-05", "0.00001", True),
        ("10.0 00", "10 00", False),  # digits, as the second word shows
        ("10.0 007 0.33333333", "10.0 007 0.3333333333", True),
        ("11", "0011", False),
        ("0011", "0011", True),
        ("0", "0", True),
        ("Yes", "YES", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "8" * 5000, False),
        ("12345678901234567890", "12345678901234567891", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs(printed, wanted, same):
    assert same_output(printed, wanted) is same


@pytest.mark.parametrize(
    ("returned", "wanted", "same"),
    [
        ((1, (2,)), [1, [2]], True),
        ({1: (2,)}, {"1": [2]}, True),
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        (complex(3, 0), 3, False),
        ({1: "x", "1": "y"}, {"1": "y"}, False),
        ([{1: "x", "1": "y"}], [{"1": "y"}], False),
        (float("nan"), 0, False),
        (1.0, 1, True),
        ("1", 1, False),
        ({1, 2}, [1, 2], False),
        (3, [3], False),
        ([3], 3, False),
        ([], [[]], False),
        (None, [None], False),
        (range(3), [0, 1, 2], True),
        (range(3), [0, 1], False),
        (range(1, 2), [True], False),
        ({"b": 1, "a": 2}.keys(), ["b", "a"], True),
        ({"b": 1, "a": 2}.values(), [1, 2], True),
        ({"b": 1, "a": 2}.items(), [["b", 1], ["a", 2]], True),
        ([deque([1, 2])], [[1, 2]], True),
        (Values([0, 2]), [0, 2], True),
        (Values([0, True]), [0, 1], False),
        (Values([0] * 2001), [0] * 2001, False),  # more than are read
        (None, None, True),
        (0.1 + 0.2, 0.3, True),
        ([0.3], [0.1 + 0.2], True),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        (0.3000001, 0.3, False),
        (2.9999999999999996, 3, False),
        (2.9999999999999996, 3.0, True),
        (5e-17, 0.0, True),
        (2e-7, 1e-7, False),
    ],
)
def test_values(returned, wanted, same):
    assert same_value(returned, wanted) is same


@pytest.mark.parametrize(
    ("outputs", "is_wrapped"),
    [
        ([[3]], True),
        ([[False], [True]], True),
        ([[[]], [[1, 2]]], True),
        ([[[]]], False),
        ([[None], [None]], False),
        ([[3], [1, 2]], False),
        ([[3], 4], False),
        ([3], False),
    ],
)
def test_results_that_may_be_entries_of_a_list(outputs, is_wrapped):
    assert CallTests("f", ([],) * len(outputs), tuple(outputs)).may_be_wrapped is is_wrapped
