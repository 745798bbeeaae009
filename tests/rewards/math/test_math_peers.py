"""`math` on the cases of other verifiers' tests; and what fails deep inside sympy is no verdict."""

import pytest
import sympy
from math_verify import grader

from distflow.rewards.math import formula_equality
from distflow.rewards.math.reward import compute_score
from tests.rewards.math_peers import RESPONSES, RIGHT, WRONG


@pytest.mark.slow
@pytest.mark.parametrize(("table", "score"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_the_cases_of_other_verifiers(table, score):
    pairs = [
        (gold, answer)
        for gold, _, answer in (line.partition(" ##") for line in table.strip().splitlines())
    ]
    assert len(pairs) > 250
    differ = [
        pair
        for pair in pairs
        if compute_score("d", rf"so it is \boxed{{{pair[1]}}}.", pair[0]) != score
    ]
    assert differ == []


def test_the_answer_that_a_response_means():
    differ = [case for case in RESPONSES if compute_score("d", case[1], case[0]) != float(case[2])]
    assert differ == []


PLACES = [
    (grader, "simplify", "x^2-1", "(x-1)(x+1)"),
    (sympy.Expr, "evalf", "x^2-1", "(x-1)(x+1)"),
    (grader, "sympy_solve_and_compare", "2x+3y=7", "4x+6y=14"),
    (formula_equality, "latex2sympy", "x^2-1", "(x-1)(x+1)"),
]


@pytest.mark.parametrize("fault", [MemoryError, RecursionError])
@pytest.mark.parametrize(
    ("owner", "name", "gold", "answer"), PLACES, ids=[name for _, name, *_ in PLACES]
)
def test_a_full_memory_or_stack_is_no_verdict(monkeypatch, fault, owner, name, gold, answer):
    called = []

    def fail(*args, **kwargs):
        called.append(name)
        raise fault

    formula_equality._parse.cache_clear()
    monkeypatch.setattr(owner, name, fail)

    try:
        with pytest.raises(fault):
            compute_score("d", rf"\boxed{{{answer}}}", gold)
    finally:
        formula_equality._parse.cache_clear()

    assert called


def test_an_answer_too_deep_to_be_read_or_evaluated_is_wrong():
    for answer in (
        r"\sum_{k=\pi}^{1 1/2} k",
        r"\sum_{k=\pi}^{3/2} k",
        r"\begin{pmatrix}0&1e9\end{pmatrix} cm i",
        "-" * 900 + "5",
        "1+" * 400 + "1",
    ):
        assert compute_score("d", rf"\boxed{{{answer}}}", "0.1234567") == 0.0

    with pytest.raises(RecursionError):  # the fault is the row's
        compute_score("d", r"\boxed{7}", r"\sum_{k=\pi}^{3/2} k")
