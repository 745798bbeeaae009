"""What `math` calls equal: a table of right and wrong answers, and what a policy may try to get no
verdict."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.rewards.math.reward import compute_score, gold_answer, is_equal
from tests.rewards.math_cases import RIGHT, WRONG

GOLDS = (
    "7",
    "x+1",
    "5 cm",
    "(1,2)",
    "1:2",
    r"2 \pmod 5",
    "4_5",
    "0.1234567",
    r"\text{abc}",
    "x<2",
    r"\{1,2\}",
    "i",
)


def pairs(table: str) -> list[tuple[str, str]]:
    return [
        (gold, answer)
        for gold, _, answer in (line.partition(" ## ") for line in table.strip().splitlines())
    ]


@pytest.mark.parametrize(("gold", "answer"), pairs(RIGHT))
def test_equal(gold, answer):
    assert compute_score("d", rf"so it is \boxed{{{answer}}}.", gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), pairs(WRONG))
def test_not_equal(gold, answer):
    assert compute_score("d", rf"so it is \boxed{{{answer}}}.", gold) == 0.0


@pytest.mark.parametrize(("gold", "answer"), pairs(RIGHT)[::5] + pairs(WRONG)[::5])
def test_every_ground_truth_is_right_against_itself(gold, answer):
    for text in (gold, answer):
        assert compute_score("d", rf"\boxed{{{text}}}", text) == 1.0


HOSTILE = [
    "1e1000001",
    "1e99999999",
    "1e-99999999",
    "1E99999999x",
    "1e" + "9" * 500,
    "9^{9^{9}}",
    "10^{10^{10}}",
    "10^10^10^10",
    "9**9**9**9",
    r"9^{\text{9^9^9}}",
    "e^{e^{e^{e^{e^e}}}}",
    "9" + "⁹" * 9,
    "2^" * 300 + "2",
    "100000000!",
    "((((9!)!)!)!)!",
    "3" + "!" * 100,
    r"\binom{1000000000}{500000000}",
    r"{10^9 \choose 10^8}",
    r"\sum_{k=1}^{1000000000} k",
    r"\sum_{k=-10^{9}}^{0} k^2",
    r"\prod_{k=1}^{1000000000} k",
    r"\Gamma(1000000000)",
    r"\operatorname{zeros}(100000,100000)",
    r"\operatorname{eye}(100000)",
    r"\sqrt[9^{9^{9}}]{2}",
    r"\exp(\exp(\exp(100)))",
    "x^{1000000000}-1",
    "(" * 400 + "5" + ")" * 400,
    r"\sqrt{" * 100 + "2" + "}" * 100,
    r"\frac{1}{1+" * 60 + "1" + "}" * 60,
    "7" * 100_000,
    "0." + "3" * 100_000,
    "0." + "3" * 990,
    " " * 100_000 + "8",
    "8" + "." * 1_900 + "x",
    ",".join(["8"] * 900),
    ":".join(["1"] * 400),
    "2 " + "mod 6 " * 140,
    "8 " + "cm/" * 300,
    r"\pm" * 300 + "8",
    r"\text{" * 200 + "8" + "}" * 200,
    "\x00\ud800😀",
    "12_{0}",
    "Z_{99999999999}",
    r"2 \pmod{0}",
    "1/0",
    "0^0",
    "1 1/0",
    r"\begin{pmatrix}1&2\\3\end{pmatrix}",
]


@pytest.mark.slow
@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_what_cannot_be_computed_is_wrong_at_once(answer):
    for gold in GOLDS:
        started = time.process_time()
        assert compute_score("d", rf"\boxed{{{answer}}}", gold) == 0.0
        assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 20_000,
        r"\boxed{" * 20_000 + "8" + "}" * 20_000,
        "####" * 30_000,
        ("answer is ") * 20_000,
        "answer " * 20_000,
        "$" * 100_000,
        "$a " * 30_000,
        r"\[" * 50_000,
        r"\(" * 50_000,
        "." * 100_000 + "x",
        " " * 100_000 + "8",
        "2^" * 40_000 + "2",
        "123,456," * 20_000,
        "(" * 100_000,
        "1+" * 50_000 + "1",
    ],
    ids=range(15),
)
def test_a_long_response_is_searched_in_little_time(text):
    started = time.process_time()
    assert compute_score("d", text, "7") == 0.0
    assert time.process_time() - started < 2.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        "|x|" * 100,
        "(x+y+z+1)^{1000}",
        "+".join(rf"\sin({k}x)^{{9}}" for k in range(30)),
        r"\sqrt{2^{29989}-1}",
        r"\int_0^1 \frac{e^{x^2}\sin(x^3)}{\sqrt{1+x^5}} dx",
    ],
    ids=range(5),
)
def test_what_takes_too_long_to_compare_is_wrong(answer):
    started = time.process_time()
    assert not is_equal("x+7", answer)
    assert time.process_time() - started < 4.0


ATOMS = st.sampled_from(
    [
        "0",
        "7",
        "10",
        "999",
        "1e9",
        "x",
        "e",
        "i",
        r"\pi",
        r"\infty",
        "0.1",
        r"0.\overline{3}",
        "1 1/2",
        "½",
    ]
)
WRAPPINGS = st.sampled_from(
    [
        "{}^{{{}}}",
        "{}^{}",
        "{}**{}",
        "({})^({})",
        r"\frac{{{}}}{{{}}}",
        r"\binom{{{}}}{{{}}}",
        r"\sqrt[{}]{{{}}}",
        "{},{}",
        "({},{})",
        "[{},{})",
        r"\{{{},{}\}}",
        "{}_{}",
        "{}:{}",
        "{}<{}",
        (
            r"{} \mod "
            r"{}"
        ),
        (
            r"{} "
            r"\pm "
            r"{}"
        ),
        r"\sum_{{k={}}}^{{{}}} k",
        (
            r"\log_{{{}}} "
            r"{}"
        ),
        "{}!+{}",
        "{}={}",
        r"\begin{{pmatrix}}{}&{}\end{{pmatrix}}",
        r"{} \text{{ or }} {}",
        r"{} \cup {}",
        "f({},{})",
        (
            r"\sin {}^\circ "
            r"{}"
        ),
        "{}/{}",
        "|{}|{}",
        ("{} cm {}"),
        r"\operatorname{{diag}}({},{})",
        r"{}\%{}",
        r"\Gamma({}){}",
        r"x \in {} {}",
        "{} million {}",
    ]
)
FORMULAS = st.recursive(
    ATOMS,
    lambda inner: st.builds(lambda form, a, b: form.format(a, b), WRAPPINGS, inner, inner),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(FORMULAS, st.sampled_from(GOLDS))
def test_no_formula_raises_or_runs_long(answer, gold):
    started = time.process_time()
    assert compute_score("d", rf"\boxed{{{answer}}}", gold) in (0.0, 1.0)
    assert time.process_time() - started < 4.0


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="{}\\^_!$%()[]<>=:;,.&|+-*/~ \n0129exyi²½°π∞≤", max_size=40),
    st.sampled_from(GOLDS),
)
def test_no_text_raises_or_runs_long(answer, gold):
    started = time.process_time()
    assert compute_score("d", rf"\boxed{{{answer}}} or {answer}", gold) in (0.0, 1.0)
    assert time.process_time() - started < 4.0


@settings(max_examples=100, deadline=None)
@given(FORMULAS)
def test_a_formula_equals_itself_as_text(formula):
    assert is_equal(gold_answer(formula), formula)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 999),
    st.sampled_from(["cm", "kg", r"\text{ hours}", "dollars", "apples", r"\%"]),
)
def test_numbers_differ_with_units_as_without(number, other, unit):
    gold = gold_answer(f"{number} {unit}")
    assert is_equal(gold, f"{number} {unit}") and is_equal(gold, f"{number}")
    assert not is_equal(gold, f"{number + other} {unit}") and not is_equal(
        gold, f"{number + other}"
    )
