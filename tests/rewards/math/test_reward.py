"""`math` on answers written in every way that people and models write them, and on those that are
nearly right."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.rewards.extracted_answers import after_hashes, last_box, marked_answer, phrased_answer
from distflow.rewards.math.reward import (
    compute_result,
    compute_score,
    gold_answer,
    is_equal,
    normalise,
)

SETS = Path(__file__).parents[2] / "data" / "sets"


def pairs(table):
    return [tuple(line.split(" ## ")) for line in table.strip().splitlines()]


# ground truth ## response
RIGHT = pairs(r"""
-5 ## The temperature is −5.
72 ## \boxed{71}, no: \boxed{72}
72 ## so $\boxed{72}$ and not \boxed{71
42 ## \boxed{42.}
42 ## \boxed{42.}.
42 ## 42.
100 ## \boxed{1e2}
1e2 ## \boxed{100}
1.5e-3 ## \boxed{0.0015}
0.0015 ## \boxed{1.5E-3}
1000 ## \boxed{1\,000}
1234567 ## \boxed{1\,234\,567}
1000 ## \boxed{1\;000}
1000 ## \boxed{1~000}
1000 ## \boxed{1{,}000}
1000 ## \boxed{1,000}
1000 ## \boxed{1 000}
1\,000 ## \boxed{1000}
2 ## \boxed 2
2 ## $\boxed 2$ is it
2 ## \fbox{2}
2 ## \boxed{\boxed{2}}
2 ## \boxed{$2$}
1/2 ## \boxed{{1/2}}
2 ## \boxed{\(2\)}
\frac{1}{2} ## \boxed{\frac{1}{2}}
1/2 ## \boxed{\dfrac{1}{2}}
1/2 ## \boxed{\tfrac12}
1/2 ## \boxed{0.5}
\{1,2\} ## \boxed{\{2,1\}}
\left[2,5\right) ## \boxed{[2,5)}
#### 1,450 ## \boxed{1450}
#### $540 ## \boxed{540}
#### \$540 ## \boxed{540}
so \boxed{8} it is ## \boxed{8}
$5$ ## \boxed{5}
x^2+2x+1 ## \boxed{(x+1)^2}
2\sqrt{2} ## \boxed{\sqrt{8}}
\frac{\sqrt{3}}{3} ## \boxed{\frac{1}{\sqrt{3}}}
\frac{\pi}{4} ## \boxed{\pi/4}
5 ## \boxed{x=5}
x=5 ## \boxed{5}
3,5 ## \boxed{5, 3}
(1,2) ## \boxed{\left(1, 2\right)}
\pm 3 ## \boxed{\{3,-3\}}
90^\circ ## \boxed{90}
50 ## \boxed{50\%}
42 ## \boxed{42\text{ cm}}
42 ## \boxed{42 \mathrm{~cm}}
-5 ## \boxed{−5}
\text{Monday} ## \boxed{Monday}
Monday ## \boxed{\text{Monday}}
A ## \boxed{\text{(A)}}
\infty ## \boxed{\infty}
\emptyset ## \boxed{\varnothing}
\begin{pmatrix}1\\2\end{pmatrix} ## \boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}
0.333333333 ## \boxed{\frac{1}{3}}
3.14159265 ## \boxed{3.1415927}
007 ## \boxed{7}
2.50 ## \boxed{2.5}
.5 ## \boxed{0.5}
+3 ## \boxed{3}
18 ## She makes $18 every day.
18 ## so she makes 9 * 2 = $18
18 ## She makes \$18. The answer is \$18.
10 ## The total is $4 and $6, so $10.
1000 ## The answer is 1,000.
1000 ## The final answer is: 1000
5 ## The answer is: **5**
5 ## **Answer:** 5
6 ## Answer: 6 apples
0.5 ## The answer is $\frac{1}{2}$.
100 ## the answer is 1e2
4 ## The answer is 4. The number 5 is wrong.
72 ## He sold 48+24 = 72 clips.
8 ## To answer the question we add 5 + 3. That makes 8.
8 ## The answer to the question is 8. I hope it is correct.
8 ## It is 8. I have checked that the answer is correct.
1 2 3 ## \boxed{1 2 3}
8 ## The answer is 7. No, wait: we add 3 and 8.
3,5 ## The answers are 3 and 5.
""") + [
    ("1234567", "\\boxed{1\u202f234\u202f567}"),
    ("1234567", "\\boxed{1\u2009234\u2009567}"),
    ("2", "\\boxed{\n  2\n}"),
    (0.5, r"\boxed{\frac{1}{2}}"),
    (72, r"\boxed{72}"),
    (63.0, r"\boxed{63}"),
    (1e-7, r"\boxed{1e-7}"),
    (1e22, r"\boxed{10^{22}}"),
    ("4+4=8\n#### 8", r"\boxed{8}"),
    (["5", "7"], r"\boxed{7}"),
    ("18", "9 * 2 = 18\n#### 18"),
]

WRONG = pairs(r"""
1024 ## \boxed{2^{10}}
120 ## \boxed{5!}
[2,5) ## \boxed{[2,5]}
[2,5] ## \boxed{[2,5)}
(2,5) ## \boxed{[2,5]}
(2,5] ## \boxed{[2,5)}
72 ## \boxed{72}, no: \boxed{71}
72 ## \boxed{72} \boxed{}
72 ## \boxed{}
72 ## \boxed{72
5 ## \boxed{3,5}
3,5 ## \boxed{5}
5 ## \boxed{5,5,6}
5 ## \boxed{-5}
7 ## \boxed{77}
12.5 ## \boxed{12,5}
1000 ## \boxed{1\,0000}
123 ## \boxed{1 2 3}
6 ## \boxed{1 2 3}
0 ## \boxed{1 0000}
1/3 ## \boxed{0.33}
\sqrt{2} ## \boxed{1.41}
\pi ## \boxed{3.14}
0.0000001 ## \boxed{0.0000002}
10^{-7} ## \boxed{2 \cdot 10^{-7}}
\frac{1}{10000000} ## \boxed{0.0000002}
1e-9 ## \boxed{0}
0 ## \boxed{1e-9}
1000000 ## \boxed{1000001}
100000000000000000000 ## \boxed{100000000000000000001}
2.5 ## \boxed{2.51}
120 ## \boxed{4!}
4 ## \boxed{4!}
x ## \boxed{y}
x+1 ## \boxed{x+2}
3 ## \boxed{\pm 3}
1 ## \boxed{\frac{0}{0}}
0 ## \boxed{\emptyset}
2 ## \boxed{1+}
Monday ## \boxed{Tuesday}
A ## \boxed{B}
12 ## \boxed{12 \text{ or } 13}
5 ## I do not know.
5 ## The answer is 4. The number 5 is not.
10 ## 1 2 3 4 5 6 7 8 9 10 11
(3,5) ## \boxed{(5,3)}
5 ## \boxed{\text{five or six}}
""") + [
    ("72", ""),
    ("72", "#### "),
    (1e-7, r"\boxed{2e-7}"),
    ("5", "\\boxed{" + "(" * 50 + "5}"),
]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_right_answers(gold, response):
    assert compute_score("d", response, gold, {}) == 1.0


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_wrong_answers(gold, response):
    assert compute_score("d", response, gold, {}) == 0.0


GSM8K = [json.loads(line) for line in (SETS / "gsm8k_test_200.jsonl").read_text().splitlines()]
SVAMP = [json.loads(line) for line in (SETS / "svamp_test_60.jsonl").read_text().splitlines()]


def final(row: dict) -> str:
    return row["answer"].rpartition("####")[2].strip()


@pytest.mark.parametrize(
    "form",
    [
        "{solution}",
        "So \\boxed{{{final}}}.",
        "The answer is {final}.",
        "#### {final}",
        "**Answer: ${final}**",
        "{final}",
    ],
)
def test_every_gsm8k_answer_is_right_in_each_form_and_wrong_for_its_neighbour(form):
    for row, other in zip(GSM8K, GSM8K[1:] + GSM8K[:1], strict=True):
        response = form.format(solution=row["answer"], final=final(row))
        assert compute_score("gsm8k", response, row["answer"]) == 1.0, response
        is_same = float(final(row).replace(",", "")) == float(final(other).replace(",", ""))
        assert compute_score("gsm8k", response, other["answer"]) == float(is_same), response


def test_svamp_answers_are_numbers():
    for row in SVAMP:
        assert compute_score("svamp", f"\\boxed{{{row['Answer']:g}}}", row["Answer"]) == 1.0
        assert compute_score("svamp", f"\\boxed{{{row['Answer'] + 1:g}}}", row["Answer"]) == 0.0


@pytest.mark.parametrize(
    "gold", [None, "", "  ", [], {"answer": 3}, True, "$$", "####", float("nan")]
)
def test_no_ground_truth_is_an_error_not_a_wrong_answer(gold):
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("d", r"\boxed{1}", gold)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.", "{}.0", "{:e}", "${}$"])
)
def test_a_number_equals_itself_however_it_is_written(number, form):
    value = float(f"{number:e}") if "e" in form else number
    assert is_equal(gold_answer(number), form.format(number)) == (value == number)
    assert is_equal(gold_answer(number + 1), form.format(number)) == (value == number + 1)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="{}\\boxed$#0123456789 .,^_%()[]\n", max_size=60))
def test_whatever_a_model_writes_gets_a_score(text):
    assert compute_score("d", text, "7") in (0.0, 1.0)


def test_finding_the_answer():
    assert last_box(r"\boxed{a} \boxed{b{c}d} \boxed{e") == "b{c}d"
    assert last_box(r"\boxed{\{1\}}") == r"\{1\}"
    assert (
        last_box("no box") is None and last_box(r"\boxed") is None and last_box(r"\boxed{}") == ""
    )
    assert after_hashes("a #### 1\n#### 2 \nrest") == "2" and after_hashes("a") is None
    assert marked_answer("#### 1 \\boxed{2}") == "2"
    assert phrased_answer("The answer is 3. The final answer is: **4**") == ("4**", "")
    assert phrased_answer("To answer the question we add.\nIt makes 5.") is None
    assert (
        phrased_answer("The answer is 3.5 kg. Good") == ("3.5 kg", ". Good")
        and phrased_answer("none") is None
    )


def test_normalising():
    assert normalise(r"$\left( 1 \right)$") == "( 1 )"
    assert normalise("12 : ") == "12" and normalise("3!") == "3!" and normalise("5\\, ") == "5"
    assert (
        normalise("1e2") == r"1 \cdot 10^{2}"
        and normalise("2e^3") == "2e^3"
        and normalise("0x1e2") == "0x1e2"
    )


@pytest.mark.parametrize(
    ("response", "truth", "reward_result"),
    [
        (
            r"\boxed{\frac{14}{2}}",
            "so\n#### 7",
            {"score": 1.0, "extracted": r"\frac{14}{2}", "wanted": "7"},
        ),
        ("it is 8", ["7", "9"], {"score": 0.0, "extracted": "8", "wanted": ["7", "9"]}),
        ("it is 9", ["7", "9"], {"score": 1.0, "extracted": "9", "wanted": "9"}),
        ("no idea", "7", {"score": 0.0, "extracted": None, "wanted": "7"}),
    ],
)
def test_what_was_compared_is_told(response, truth, reward_result):
    assert compute_result("", response, truth) == reward_result


# response ## the value that it states, if it states one
WORDS = r"""
The answer is not 18 ##
The answer is not: 18 ##
The answer isn't 18. ##
The answer isn’t 18. ##
It is neither 17 nor 18 ##
not 18 ##
The answer is 17, not 18 ## 17
The answer is not 17 but 18. ## 18
She has 18 eggs, not 17. ## 18
The answer is not $6$, but $5$. ## 5
The answer is at least 18 ##
less than 18 ##
<answer>between 17 and 18</answer> ##
The answer is half of 18 ##
The answer is the square of 18 ##
The answer is the opposite of 18 ##
The answer is close to 18 ##
The answer is almost 18. ##
The answer is everything except 18 ##
The answer is almost certainly 18 ## 18
She needs at least 18 eggs. ## 18
The answer is 17; 18 ##
<answer>17 18</answer> ##
17 to 18 ##
It grew from 17 to 18. ## 18
The answer is 18 plus 2 ##
The answer is 36 minus 18 ##
The answer is 5 over 2 ## 5/2
The answer is 18 squared ##
The answer is 18 thousand ## 18000
The answer is negative 18 ## -18
The answer is 18, which is 9 + 9. ## 18
The answer is 17 because 18 is too many ## 17
The answer is 2 1/2 hours. ## 5/2
She makes €18. ## 18
"""


@pytest.mark.parametrize("case", [*WORDS.strip().splitlines(), "17\n18 ## 18"])
def test_the_words_around_a_number_count(case):
    response, _, answer = case.partition(" ##")
    assert [
        gold
        for gold in ("17", "18", "-18", "18000", "5", "6", "5/2")
        if compute_score("", response, gold)
    ] == answer.split()


@pytest.mark.parametrize(
    ("gold", "box"),
    [
        ("18", r"\large 18"),
        ("18", r"\color{blue}{18}"),
        ("18", r"\textcolor{red}{18}"),
        ("18", r"\underline{18}"),
        ("18", r"18\; \text{(dollars)}"),
        ("18", r"18 \ (\text{dollars})"),
        (r"\frac{3}{4}", "{3}/{4}"),
        ("[2,5)", r"x\in[2,5)"),
    ],
)
def test_presentation_of_a_boxed_value_does_not_count(gold, box):
    assert compute_score("", rf"\boxed{{{box}}}", gold) == 1.0


def test_the_search_for_a_final_number_takes_linear_time():
    # hours, if the search backtracked
    assert compute_score("", "It is 1" + " " * 300_000 + "18", "18") == 1.0
    assert compute_score("", "The answer is 18" + " " * 300_000 + "because", "18") == 1.0
