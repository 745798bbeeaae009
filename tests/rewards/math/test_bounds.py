"""What an answer may cost: bounds against values computed in full, and the limit of processor
time."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.rewards.math.formula_equality import MAX_BITS, is_affordable

NUMBERS = st.integers(0, 60).map(lambda n: (str(n), n))
FORMULAS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: (f"({a[0]})+{b[0]}", a[1] + b[1]), inner, inner),
        st.builds(lambda a, b: (rf"({a[0]}) \cdot ({b[0]})", a[1] * b[1]), inner, inner),
        st.builds(lambda a, b: (f"({a[0]})^{{{b}}}", a[1] ** b), inner, st.integers(0, 9)),
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(FORMULAS, st.integers(0, 20_000))
def test_what_is_affordable_has_no_more_bits_than_allowed(formula, exponent):
    text, value = formula
    bits = math.log2(max(value, 1)) * exponent
    assert not is_affordable(f"({text})^{{{exponent}}}") or bits <= MAX_BITS
    assert is_affordable(text) or math.log2(max(value, 2)) > 50


@pytest.mark.parametrize(
    "text",
    [
        r"2^{2017}-1",
        "2023!",
        r"\frac{100!}{98!}",
        r"2023^{2023}",
        r"\binom{100}{50}",
        r"e^{e^{2}}",
        "x^{2023}",
        (
            r"\sum_{n=1}^{100} "
            r"n^2"
        ),
        r"\frac{1}{2+\frac{1}{2+\frac{1}{2+\frac{1}{2}}}}",
        r"e^{-\frac{x^2}{2}}",
        "(3!)!",
    ],
)
def test_what_competitions_ask_for_is_affordable(text):
    assert is_affordable(text)
