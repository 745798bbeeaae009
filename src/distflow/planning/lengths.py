"""Tokens of prompts and responses, as a plan assumes them or as a run measured them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log1p
from statistics import fmean

from distflow.config import Config
from distflow.errors import UserError

_QUANTILES = 1000


@dataclass(frozen=True)
class Lengths:
    prompt: float
    """Mean tokens of a prompt."""
    responses: tuple[float, ...]
    """Tokens of responses of equal shares, ascending."""
    longest: int
    """The most tokens that a response may have."""

    @cached_property
    def response(self) -> float:
        """Mean tokens of a response."""
        return fmean(self.responses)

    @property
    def sequence(self) -> float:
        return self.prompt + self.response

    @property
    def end(self) -> float:
        """Tokens of the longest response of a batch."""
        return self.responses[-1]

    def running(self, position: float) -> float:
        """Share of the responses that have more tokens."""
        return 1 - bisect_right(self.responses, position) / len(self.responses)


def assumed_lengths(
    config: Config, prompt: float | None = None, response: float | None = None
) -> Lengths:
    """Lengths with these means, by default half of the limits. Raises UserError for means that no
    prompt or response can have."""
    data = config.data
    mean = _mean_of("prompt", prompt, data.max_prompt_length)
    limit = data.max_response_length
    return Lengths(mean, spread_evenly(_mean_of("response", response, limit), limit), limit)


def _mean_of(what: str, chosen: float | None, limit: int) -> float:
    if chosen is None:
        return max(1.0, limit / 2)
    if not 0 < chosen <= limit:
        raise UserError(
            f"--{what}-tokens={chosen:g}: the mean must be above 0 and at most "
            f"data.max_{what}_length={limit}"
        )

    return chosen


def spread_evenly(mean: float, limit: float) -> tuple[float, ...]:
    """Responses from 0 to twice the mean. If that is above the limit, as many are cut there as the
    mean implies."""
    end = min(2 * mean, limit)
    num_cut = round(_QUANTILES * (2 * mean - end) / end)
    num_ended = _QUANTILES - num_cut
    ended = (end * (place + 0.5) / num_ended for place in range(num_ended))
    return (*ended, *(end for _ in range(num_cut)))


def lengths_under(limit: int, lengths: Sequence[float], old_limit: int) -> tuple[float, ...]:
    """Measured lengths of responses as another limit would have them, ascending. Longer ones are
    cut. Those that the old limit cut continue, and end at the rate at which responses ended below
    it."""
    ended = [length for length in lengths if length < old_limit]
    number = len(lengths) - len(ended)
    rate = len(ended) / sum(lengths)

    longer = []
    for place in range(number):
        more = -log1p(-(place + 0.5) / number) / rate if rate else limit
        longer.append(old_limit + more)

    return tuple(sorted(min(float(limit), length) for length in (*ended, *longer)))


def quantiles(values: Sequence[float], number: int) -> tuple[float, ...]:
    """So many values of equal shares, ascending; all values if there are fewer."""
    ordered = sorted(values)
    if len(ordered) <= number:
        return tuple(ordered)
    return tuple(ordered[int((place + 0.5) * len(ordered) / number)] for place in range(number))
