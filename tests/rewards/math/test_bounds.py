"""What an answer may cost: bounds against values computed in full, and the limit of processor time."""

import math
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.rewards.math.bounds import MAX_BITS, OutOfTime, is_affordable, limited_time

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
    [r"2^{2017}-1", "2023!", r"\frac{100!}{98!}", r"2023^{2023}", r"\binom{100}{50}", r"e^{e^{2}}", "x^{2023}",
     r"\sum_{n=1}^{100} n^2", r"\frac{1}{2+\frac{1}{2+\frac{1}{2+\frac{1}{2}}}}", r"e^{-\frac{x^2}{2}}", "(3!)!"],
)  # fmt: skip
def test_what_competitions_ask_for_is_affordable(text):
    assert is_affordable(text)


def test_time_is_limited_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGVTALRM)
    started = time.process_time()
    with pytest.raises(OutOfTime), limited_time(0.1):
        while True:
            pass
    assert time.process_time() - started < 1.0
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0.0
    with limited_time(0.1):
        time.sleep(0.3)  # costs no processor time


def test_another_thread_has_no_limit():
    done: list[bool] = []

    def work():
        with limited_time(0.01):
            done.append(sum(range(3_000_000)) > 0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
