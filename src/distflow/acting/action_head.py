"""The head that draws the numbers of continuous actions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.models.number_head import Normals

WIDEST = 2.0
"""The bins of a flow's numbers lie between -WIDEST and WIDEST."""


@dataclass(frozen=True)
class ActionHead:
    """Draws the numbers of continuous actions, each as a token with a value beside it: number
    `place` of a generation has the `bins` tokens from `first + bins * place` on.

    Without `steps` (gaussian) its token is the first of them. With `steps` (flow SDE) an action has
    `1 + steps` times `dim` numbers: noise, and all numbers after each denoising step; the token is
    that of the value's bin.
    """

    first: int
    dim: int = 1
    steps: int = 0
    bins: int = 2
    noise: float = 0.0
    """The standard deviation that the SDE adds from the time 0 to 1."""

    def tokens_of(self, place: int, values: Tensor) -> Tensor:
        """The tokens `(n,)` of number `place` of several generations, which has these values."""
        first = self.first + self.bins * place
        if not self.steps:
            return torch.full_like(values, first, dtype=torch.long)
        shares = (values.double().nan_to_num() + WIDEST) / (2 * WIDEST)
        bins = (shares * self.bins).floor().clamp(0, self.bins - 1)
        return first + bins.long()

    def normals(self, tokens: Tensor, before: Tensor) -> Normals:
        """Of the numbers that tokens `(n,)` stand for. before: the values `(n,)`, `dim` numbers
        earlier, that denoising steps start from.

        In a step from the time t the logit is the action `a` that the model expects; the velocity
        from the noisy number `x` to it is `v = (a - x) / (1 - t)`. Over the time `d` the SDE gives
        a normal distribution with the mean
        `x + v * d` and the standard deviation `noise * sqrt(d)` (Euler-Maruyama).
        """
        zeros = torch.zeros_like(before)
        if not self.steps:
            return Normals(tokens, zeros, zeros + 1, zeros + math.nan)

        place = (tokens - self.first).div(self.bins, rounding_mode="floor")
        bin_ = (tokens - self.first) % self.bins
        step = place % (self.dim * (1 + self.steps)) // self.dim  # 0: noise
        gain = (step > 0) / (1 + self.steps - step)
        offset = torch.where(step > 0, before * (1 - gain), zeros)
        log_std = (step > 0) * math.log(self.noise / math.sqrt(self.steps))

        return Normals((tokens - bin_).clamp(min=0), offset, gain.to(zeros), log_std.to(zeros))
