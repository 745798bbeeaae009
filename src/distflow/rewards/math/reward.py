r"""`math`: is the final answer mathematically equal to the ground truth?

The answer is the last box, else the text after `####`, else the part called the answer, else the
last formula or number. Every response gets a score: an answer that is too costly to compare, or
makes the comparison raise, is wrong. Only a full memory and a full stack are reward errors.
"""

import math
import re
import unicodedata

from distflow.observe.crash_safe_files import JSON
from distflow.rewards.denied_answers import without_comparisons
from distflow.rewards.extracted_answers import (
    DENIED,
    final_formula,
    is_mathematics,
    last_mathematics,
    marked_answer,
    phrased_answer,
    without_markup,
)
from distflow.rewards.math.equality import are_equal
from distflow.rewards.math.notation import is_unit, normalise, without_remarks, words
from distflow.untrusted_files import OutOfTime, limited_time

_CURRENCY_MARK = re.compile(r"\\?\$(?=\s?\d[\d,]*(?:\.\d+)?[.,;:!?)*]*(?:\s+[A-Za-z(]|\s*$|\s*\n))")
_SET = re.compile(r"(?<![\\\w}^])\{([^{}\\]*,[^{}\\]*)\}")
_ALONE = re.compile(r"[^\s*]*[\d^\\][^\s*]*|-?\d+ \d+/\d+\.?")
_WORD = re.compile(r"[A-Za-z]{2}")
_FRACTION = re.compile(r"([0-9]?)([¼-¾⅐-⅞])(?![\w(])")
_MARK_OF_PHRASE = re.compile(r"(\banswer)\s*[:=]", re.I)
_POWER = re.compile(r"\$\^(?<=[A-Za-z]\$\^)\{?(\d)\}?\$")
_TAKEN_BACK = re.compile(
    r"[\s.!*_$]*(?:Wait|Actually|Oops|Sorry|Hmm|Correction|No(?=[,.!]))\b", re.I
)
_MAX_PHRASE = 100


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None
) -> float:
    """1.0 if the answer equals the ground truth (or one of them, if it is a list), else 0.0.

    Raises ValueError if there is no ground truth.
    """
    if compute_result(data_source, solution_str, ground_truth, extra_info)["score"]:
        return 1.0
    return 0.0


def compute_result(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None
) -> dict[str, JSON]:
    """As `compute_score`, with what was compared: `extracted` from the response, None if it has no
    answer, and `wanted`, the ground truth that it equals, else all of them."""
    if isinstance(ground_truth, list | tuple):
        alternatives = ground_truth
    else:
        alternatives = [ground_truth]

    golds = [gold_answer(gold) for gold in alternatives]
    if not golds:
        raise ValueError("the ground truth is an empty list")

    marked = marked_answer(solution_str)
    for gold in golds:
        answer = (
            marked
            if marked is not None
            else _unmarked(solution_str, is_text=words(gold) is not None)
        )
        if answer is not None and is_equal(gold, answer):
            return {"score": 1.0, "extracted": answer, "wanted": gold}

    return {"score": 0.0, "extracted": answer, "wanted": golds[0] if len(golds) == 1 else [*golds]}


def gold_answer(ground_truth: object) -> str:
    """The bare answer of a data set's row, which is a number, LaTeX, or a worked solution with a
    marked answer."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, int | float | str):
        raise ValueError(
            f"the ground truth is {ground_truth!r}: 'math' needs a number or a str "
            "(data.answer_key)"
        )

    if isinstance(ground_truth, float) and ground_truth.is_integer():
        ground_truth = int(ground_truth)
    if isinstance(ground_truth, float) and not math.isfinite(ground_truth):
        raise ValueError(f"the ground truth is {ground_truth} (data.answer_key)")
    if isinstance(ground_truth, int | float):
        return normalise(repr(ground_truth))

    marked = marked_answer(ground_truth)
    answer = normalise(ground_truth if marked is None else marked)
    if not answer:
        raise ValueError(f"no answer in the ground truth {ground_truth[:80]!r} (data.answer_key)")

    return answer


def is_equal(gold: str, answer: str) -> bool:
    """gold: from `gold_answer`. answer: the text in the box or after the mark.

    An answer that takes too long or has numbers beyond Python's is wrong: with a reward error a
    policy could avoid a score of 0. A bug (TypeError, ...), a full memory (MemoryError) and a full
    stack (RecursionError) are raised.
    """
    try:
        with limited_time():
            return are_equal(gold, normalise(answer))
    except (OutOfTime, ArithmeticError, ValueError):
        return False


def _unmarked(text: str, is_text: bool) -> str | None:
    """The unmarked answer of the text, or None. is_text: the ground truth is words; else a formula
    or number."""
    phrased = phrased_answer(text)
    if phrased is not None:
        phrase = _plain(phrased[0])
        is_final = not _TAKEN_BACK.match(phrased[1])
        if is_text or (_ALONE.fullmatch(phrase) and is_final):
            return phrase if len(phrase) <= _MAX_PHRASE else None
        if is_final and is_mathematics(phrase):
            return phrase

        found = _last_value(phrase, is_answer=True)
        if found and (found.startswith(DENIED) or not is_final):
            found = _last_value(_plain(phrased[1])) or found
        if found:
            return found

    text = _plain(text)
    if "nswer" in text:
        text = _MARK_OF_PHRASE.sub(r"\1 is", text)
    if is_text:
        return text if len(text) <= _MAX_PHRASE else None
    if phrased is None and (formula := final_formula(text)):
        return formula

    is_answer = len(text) <= _MAX_PHRASE and not _WORD.search(without_comparisons(text))

    return _last_value(text, is_answer)


def _last_value(prose: str, is_answer: bool = False) -> str | None:
    """The last formula, or number with its unit."""
    found = last_mathematics(_CURRENCY_MARK.sub("", prose).replace(r"\$", ""), is_answer)
    return _with_unit(*found) if found else None


def _plain(text: str) -> str:
    """The text without markup and remarks, and with the brackets of sets as in LaTeX."""
    text = without_markup(text.replace("\N{MINUS SIGN}", "-").strip()).strip("*`_~ \n")
    text = _POWER.sub(r"^\1", text)
    if not text.isascii():
        text = _FRACTION.sub(_spelled_out, text)
    return _SET.sub(r"\\{\1\\}", without_remarks(text)).strip()


def _spelled_out(fraction: re.Match[str]) -> str:
    """`½` as 1/2, and `1½` as 1 1/2."""
    plain = unicodedata.normalize("NFKC", fraction[2]).replace("\N{FRACTION SLASH}", "/")
    return f"{fraction[1]} {plain}".lstrip()


def _with_unit(answer: str, word: str) -> str:
    return answer + word if is_unit(word) else answer
