"""Heads by which a policy draws numbers: each number is a token with a value beside it, which comes
from a normal distribution whose parameters are logits of the model."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from distflow.builtin_names import NUMBER_HEADS
from distflow.import_target import load

LOG_STD = (-3.0, 1.0)
"""Bounds of the logarithm of a standard deviation of numbers. A smaller one would
magnify the rounding of the mean, so that engine and trainer differ."""


class NumberHead(Protocol):
    """Number `place` of a generation has the `bins` tokens from `first + bins * place` on."""

    @property
    def first(self) -> int: ...

    @property
    def bins(self) -> int: ...

    @property
    def dim(self) -> int:
        """How many numbers earlier the value is that `normals` starts from."""
        ...

    def tokens_of(self, place: int, values: Tensor) -> Tensor:
        """The tokens `(n,)` of number `place` of several generations, which has these values."""
        ...

    def normals(self, tokens: Tensor, before: Tensor) -> "Normals":
        """Of the numbers that tokens `(n,)` stand for. before: the values `(n,)`, `dim` numbers
        earlier."""
        ...


def make_head(fields: Mapping[str, Any]) -> NumberHead:
    """fields: the `name` of a head in the table NUMBER_HEADS, and its arguments."""
    options = {name: value for name, value in fields.items() if name != "name"}
    make = cast(Callable[..., NumberHead], load(NUMBER_HEADS[fields["name"]].target))
    return make(**options)


class Normals(NamedTuple):
    """Normal distributions of numbers, all `(n,)`: the mean is offset + gain times the logit of
    `tokens`. log_std: NaN where tanh of the next token's logit spans the bounds `LOG_STD`."""

    tokens: Tensor
    offset: Tensor
    gain: Tensor
    log_std: Tensor


class NumberTargets(NamedTuple):
    """Targets with values. tokens: int64 `(n,)`. values: float `(n,)`, the numbers. is_number: bool
    `(n,)`, False on other tokens. normals: of the numbers."""

    tokens: Tensor
    values: Tensor
    is_number: Tensor
    normals: Normals


def normal_of(logits: Tensor, normals: Normals) -> tuple[Tensor, Tensor]:
    """Mean and log standard deviation, `(n,)`, by logits `(n, vocabulary)`."""
    tokens, offset, gain, log_std = normals
    rows = torch.arange(len(tokens), device=tokens.device)
    low, high = LOG_STD

    # unlike `gather` it keeps no logits for backward
    raw = logits[rows, (tokens + 1).clamp(max=logits.shape[-1] - 1)]
    learned = low + (high - low) / 2 * (raw.tanh() + 1)
    spread = torch.where(log_std.isnan(), learned, log_std.to(learned))

    return offset + gain * logits[rows, tokens], spread


def normal_log_probs(values: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """The log-density of values, all `(n,)`."""
    deviations = (values - mean) * (-log_std).exp()
    return -deviations.square() / 2 - log_std - math.log(2 * math.pi) / 2
