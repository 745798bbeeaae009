"""How a check of a recorded step is declared, and how it fails."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from distflow.checks.samples import Sample
from distflow.import_target import is_ours

NOT_APPLICABLE = ""
"""A check's result if the run has nothing to check."""


class Wrong(Exception):
    """The recorded step contradicts the check's statement; the message is for the user."""


@dataclass(frozen=True)
class Check:
    """One statement about a step, and the function that checks it."""

    name: str
    statement: str
    needs: str
    """What the check requires."""
    limit: str
    """The tolerated difference, in words."""
    run: Callable[[Any], str | None]
    """Called with a `RecordedStep`, a `Validated`, or at the start the `CheckedRun`. Returns None
    if the check passed, `NOT_APPLICABLE` if there is nothing to check, else why it could not be
    made. Raises Wrong if it failed."""


def check(
    name: str, statement: str, *, needs: str, limit: str
) -> Callable[[Callable[[Any], str | None]], Check]:
    """Makes a `Check` of the decorated function."""
    return partial(Check, name, statement, needs, limit)


def check_tokens(sample: Sample, column: str, expected: Tensor, wrong: Tensor, reason: str) -> None:
    """Raises Wrong with the first wrong token of the sample, if any. reason: the rule that gives
    the expected value."""
    if not bool(wrong.any()):
        return

    place = tuple(wrong.nonzero()[0].tolist())  # the token, and which of its entries
    raise Wrong(
        f"{column} of sample {sample['uid']} is {float(sample[column][place]):g} at token "
        f"{place[0]} of {len(expected)}, but should be {float(expected[place]):g}{reason}"
    )


def check_same(sample: Sample, column: str, found: object, expected: object, source: str) -> None:
    """Raises Wrong if the values differ. source: who says what is expected."""
    if found != expected:
        raise Wrong(
            f"{column} of sample {sample['uid']} is {shortened(found)}, but should be "
            f"{shortened(expected)} by {source}"
        )


def shortened(value: object) -> str:
    text = repr(value)
    if len(text) <= 160:
        return text
    return f"{text[:80]} … {text[-60:]}"


def is_builtin(fn: Callable[..., object]) -> bool:
    """Whether the function, without wrappers, is defined in distflow."""
    return is_ours(plain_function(fn))


def plain_function(fn: Callable[..., object]) -> Callable[..., object]:
    while hasattr(fn, "func"):
        fn = fn.func
    return fn
