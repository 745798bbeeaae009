"""`reasoning_gym`: the score from a data set of the package `reasoning-gym` for its own row.

Some of that package's functions evaluate the answer, a model's text, as Python, directly or through
sympy: here it is read as a literal or as arithmetic with a few names instead.
"""

import ast
import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from distflow.data.task_packages import GYM, make_dataset, missing, read_entry

try:
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError(f"the reward 'reasoning_gym' {missing('reasoning-gym')}") from error

EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Data sets that call `eval` on an answer."""
EXPRESSIONS = (
    *("countdown", "puzzle24", "polynomial_multiplication"),
    *("simple_integration", "intermediate_integration"),
)
"""Data sets that pass an answer to sympy's parser, which evaluates it."""
_NAMES = {
    "sin",
    "cos",
    "tan",
    "exp",
    "log",
    "ln",
    "sqrt",
    "pi",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
}
_ARITHMETIC = re.compile(r"(?:[A-Za-z]+|\d+(?:\.\d+)?|[-+*/^(),\s])*")
_LONGEST = 1000


def compute_score(
    solution_str: str, extra_info: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The data set's score, from 0.0 to 1.0, of the text between the last <answer> and </answer>;
    only 1.0 is right (`acc`). `answer` is that text.

    An unreadable answer scores 0.0, like none. Raises ValueError for a row of another data set,
    UserError for one unknown to this version of the package.
    """
    made = (extra_info or {}).get(GYM)
    if not isinstance(made, Mapping) or not isinstance(made.get("entry"), str):
        raise ValueError(f"the row has no column '{GYM}': its data must be reasoning-gym:NAME")

    name = str(made["name"])
    entry = read_entry(str(made["entry"]))
    dataset = _dataset(name, json.dumps(made["settings"]))

    answer = extract_answer(solution_str)
    try:
        score = float(dataset.score_answer(answer if is_readable(name, answer) else None, entry))
    except MemoryError:
        raise
    # the data set cannot read the answer: the packages that read it raise errors of any kind
    except Exception:
        score = float(dataset.score_answer(None, entry))

    return {"score": score, "acc": float(score >= 1), "answer": answer}


def is_readable(name: str, answer: str | None) -> bool:
    """Whether the answer is only arithmetic, if the data set of that name evaluates it."""
    if name not in EXPRESSIONS or answer is None:
        return True
    if len(answer) > _LONGEST or not _ARITHMETIC.fullmatch(answer):
        return False
    return all(len(word) == 1 or word in _NAMES for word in re.findall(r"[A-Za-z]+", answer))


@cache
def _dataset(name: str, settings: str) -> Any:
    dataset = make_dataset(name, json.loads(settings))
    if name in EVALUATED:  # a module's own names come before the built-in ones
        vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
    return dataset
