"""The built-in tools. Like a user's, each is a function, or a class whose instances are called."""

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from distflow.errors import UserError

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "sqrt": math.sqrt,
}
_MAX_EXPONENT = 10_000
_MAX_CHARACTERS = 1000


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: The expression, for example "(12 + 30) * 2 / sqrt(16)".
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {_MAX_CHARACTERS} characters")
    return str(_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first = _value(left)
            second = _value(right)
            if isinstance(sign, ast.Pow) and abs(second) > _MAX_EXPONENT:
                raise ValueError(f"the exponent is larger than {_MAX_EXPONENT}")
            return _OPERATORS[type(sign)](first, second)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))

    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


class Search:
    """Ranks the texts of a file by BM25 (k1 = 1.2, b = 0.75); on a tie the earlier comes first."""

    _K1 = 1.2
    _B = 0.75

    def __init__(self, file: str, count: int = 3) -> None:
        """file: a text on each line, or in `text` (and `title`) of each line's JSON object if it
        ends in .jsonl."""
        self._texts = _read_texts(Path(file).expanduser())
        self._count = count
        self._places: dict[str, list[tuple[int, int]]] = {}

        lengths = []
        for number, text in enumerate(self._texts):
            words = Counter(_words(text))
            lengths.append(sum(words.values()))
            for word, times in words.items():
                self._places.setdefault(word, []).append((number, times))

        mean = sum(lengths) / len(lengths) or 1.0
        self._weights = [self._K1 * (1 - self._B + self._B * length / mean) for length in lengths]

    def __call__(self, query: str) -> str:
        """Searches a collection of texts and returns those that fit best.

        Args:
            query: The words to search for.
        """
        scores: Counter[int] = Counter()
        for word in dict.fromkeys(_words(query)):
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self._texts) - len(places) + 0.5) / (len(places) + 0.5))
            for number, times in places:
                scores[number] += rarity * times * (self._K1 + 1) / (times + self._weights[number])  # type: ignore[assignment]

        best = sorted(scores, key=lambda number: (-scores[number], number))[: self._count]
        found = "\n\n".join(self._texts[number] for number in best)
        return found or "no text has any of these words"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _read_texts(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        if file.suffix == ".jsonl":
            lines = [_text_of_row(json.loads(line)) for line in lines]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"the texts of the tool search cannot be read from '{file}': {error}"
        ) from None

    if not any(lines):
        raise UserError(
            f"'{file}' has no text for the tool search: put one on each line, or in 'text' of a "
            ".jsonl"
        )

    return lines


def _text_of_row(row: dict[str, object]) -> str:
    return "\n".join(str(row[key]) for key in ("title", "text") if row.get(key))


def python(code: str) -> str:
    """Runs Python code and returns what it prints. Names that it defines are kept for later calls.

    Args:
        code: The code to run.
    """
    raise AssertionError("it runs in the sandbox")


BUILTIN_TOOLS = {
    "calculator": f"{__name__}:calculator",
    "python": f"{__name__}:python",
    "search": f"{__name__}:Search",
}
"""The target of each built-in tool, by its name in a config."""
