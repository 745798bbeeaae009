"""How a check of the auditor is declared, fails, and compares the values of tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from distflow.import_target import is_ours

NOT_APPLICABLE = ""
"""A check's result if the pipeline has nothing to check."""
Sample = Mapping[str, Any]
"""One sample, by column name: a tensor for each per-token column, a value for the others."""


class Wrong(Exception):
    """The recorded step contradicts the check's statement; the message is for the user."""


@dataclass(frozen=True)
class Check:
    """One statement about a step, and the function that checks it.

    needs: what the check requires. limit: the tolerated difference, in words. run: called with a
    `RecordedStep`, a `Validated`, or at the start the `AuditedRun`; returns None if the check
    passed, `NOT_APPLICABLE` if there is nothing to check, else why it could not be made; raises
    Wrong if it failed.
    """

    name: str
    statement: str
    needs: str
    limit: str
    run: Callable[[Any], str | None]


def check(
    name: str, statement: str, *, needs: str, limit: str
) -> Callable[[Callable[[Any], str | None]], Check]:
    """Makes a `Check` of the decorated function."""
    return partial(Check, name, statement, needs, limit)


def check_tokens(sample: Sample, column: str, expected: Tensor, wrong: Tensor, reason: str) -> None:
    """Raises Wrong with the first wrong token of the sample, if any. reason: the rule that gives
    the expected value."""
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise Wrong(
            f"{column} of sample {sample['uid']} is {float(sample[column][token]):g} at token "
            f"{token} of "
            f"{len(expected)}, but should be {float(expected[token]):g}{reason}"
        )


def check_close(
    samples: Sequence[Sample],
    column: str,
    expected: Sequence[Sequence[float]],
    limit: float,
    reason: Callable[[Sample], str],
) -> None:
    """Raises Wrong if a token's value is not the expected one. limit: relative, to at least 1; NaN
    is never close."""
    if not samples:
        return
    wanted = torch.tensor(list(chain.from_iterable(expected)), dtype=torch.float64)
    gap = (doubles(torch.cat([sample[column] for sample in samples])) - wanted).abs()
    if bool((wrong := ~(gap <= limit * wanted.abs().clamp(min=1.0))).any()):
        lengths = [len(row) for row in expected]
        for sample, own, odd in zip(
            samples, wanted.split(lengths), wrong.split(lengths), strict=True
        ):
            check_tokens(sample, column, own, odd, reason(sample))


def doubles(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)


def is_builtin(fn: Callable[..., object]) -> bool:
    """Whether the function, without wrappers, is defined in distflow."""
    return is_ours(plain_function(fn))


def plain_function(fn: Callable[..., object]) -> Callable[..., object]:
    while hasattr(fn, "func"):
        fn = fn.func
    return fn
