"""Rows on which no answer can be judged are found without running anything."""

import pytest

from distflow.rewards.startup_checks import find_broken

GOOD = ["assert f(1) == 2"]


@pytest.mark.parametrize(
    ("names", "answer", "row", "said"),
    [
        (["code"], GOOD, {}, ""),
        (["math"], None, {}, ""),
        (["module:function", "format"], None, {}, ""),
        (["code"], ["assert f(1) ==", *GOOD], {}, "not valid Python"),
        (["math", "code_share"], ["assert 1 == 1"], {}, "do not call a function"),
        (["code"], {"inputs": ["1\n"]}, {}, "'inputs' and 'outputs' must be lists"),
        (
            ["code"],
            {"inputs": ["1\n", "2\n"], "outputs": ["3\n"]},
            {},
            "2 'inputs' and 1 'outputs'",
        ),
        (["code"], {"inputs": ["1"], "outputs": ["{"], "fn_name": "f"}, {}, "is not JSON"),
        (["code"], "print(1)", {"test_list": GOOD}, ""),
        (["code"], "print(1)", {}, "needs tests"),
        (["code"], [{"input": "1", "output": "2"}, "output(input)"], {}, "'test_list' is"),
        (["ifeval"], None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, ""),
        (
            ["ifeval_loose"],
            None,
            {"instruction_id_list": ["punctuation:none"], "kwargs": [{}]},
            "no instruction",
        ),
        (
            ["ifeval_share"],
            None,
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
            "1 entries",
        ),
    ],
)
def test_what_is_wrong_with_a_row(names, answer, row, said):
    found = find_broken(names, answer, row)
    assert said in found and bool(found) == bool(said)
