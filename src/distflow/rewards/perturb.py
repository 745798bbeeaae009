r"""Responses of which it is known whether they are right: a row's own answer as answers are written, and wrong ones.

What `math` calls equal to the row's answer is not taken for a wrong one: `1/2` beside `\frac{1}{2}`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distflow.rewards.answers import bare_answer
from distflow.rewards.math_reward import gold_answer, is_equal

OWN = "own response"
FORMS: Mapping[str, str] = {
    "box": r"So it is \boxed{{{}}}.",
    "phrase": "The answer is {}.",
    "hashes": "That makes it.\n#### {}",
    "alone": "{}",
}
"""How an answer is written down, by name."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MEASURE = re.compile(r"(-?\d[\d,.]*)\s*(?:\\text\s*\{\s*)?([A-Za-z]{2,})\s*\}?")
_LETTER = re.compile(r"\(?([A-E])\)?")

HOSTILE: tuple[str, ...] = (
    "x" * 2**20,
    r"\boxed{" * 20_000,
    "(" * 50_000,
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{1e999999999}",
    r"\boxed{\binom{10^9}{10^8}}",
    r"\boxed{__import__('os')}",
    "\x00\x1b[31m\ufffd",
    "\ud800",
    r"\boxed{}" * 1000,
    "#### " * 10_000,
)
"""Responses that are wrong whatever was asked: huge, deep, costly to compute, no text."""


class Response(NamedTuple):
    """kind: what was done to the answer. form: how it is written down, '' where it is not."""

    kind: str
    form: str
    text: str
    is_right: bool = False


def right_responses(answer: str | None, response: str | None) -> Iterator[Response]:
    """The row's answer in every form; and its own response; where it has them."""
    for form, template in FORMS.items() if answer is not None else ():
        yield Response("right answer", form, template.format(answer), is_right=True)
    if response is not None:
        yield Response("right answer", OWN, response, is_right=True)


def wrong_responses(answer: str, others: Sequence[str], form: str) -> Iterator[Response]:
    """Wrong answers in that form. others: answers to other rows."""
    template = FORMS[form]
    other = next((text for text in others if not are_same(answer, text)), None)
    for kind, text in _wrong_answers(answer, other):
        yield Response(kind, form, template.format(text))
    yield Response("empty answer", form, template.format(""))
    if other is not None:
        said = template.format(other)
        yield Response("answer named, another given", form, f"It is not {answer}, as I thought. {said}")


def _wrong_answers(answer: str, other: str | None) -> Iterator[tuple[str, str]]:
    if other is not None:
        yield "another row's answer", other
        yield "both answers", f"{answer} or {other}"
        yield "both answers", f"{other}, {answer}"
    if _NUMBER.fullmatch(answer):
        yield "a digit changed", answer[:-1] + str((int(answer[-1]) + 1) % 10)
        if answer.strip("-0.,"):
            yield "another sign", answer.removeprefix("-") if answer.startswith("-") else f"-{answer}"
            yield "a digit more", f"{answer}1" if "." in answer else f"{answer}0"
    elif measure := _MEASURE.fullmatch(answer):
        yield "another unit", f"{measure[1]} {'kg' if measure[2] != 'kg' else 'hours'}"
    elif letter := _LETTER.fullmatch(answer):
        yield "another choice", answer.replace(letter[1], "ABCDE"[("ABCDE".index(letter[1]) + 1) % 5])
        yield "all choices", "A, B, C, D, E"


def answer_of(ground_truth: object) -> str | None:
    """A row's answer as a text that may stand in a box; None where it is none, as the tests of a program are."""
    first = ground_truth[0] if isinstance(ground_truth, list | tuple) and ground_truth else ground_truth
    if isinstance(first, bool) or not isinstance(first, str | int | float):
        return None
    return bare_answer(str(first)) or None


def are_same(answer: str, other: str) -> bool:
    """Also where they are only equal to mathematics."""
    try:
        return is_equal(gold_answer(answer), other)
    except (ValueError, RecursionError):  # no answer to `math`
        return answer.split() == other.split()
