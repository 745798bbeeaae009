"""Recursions from the last token to the first. Tokens that no policy made carry the running value over."""

import torch
from torch import Tensor


def discounted_sum(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay · y_(next token under the mask), float64 `(bs, length)`; elsewhere the running y."""
    values, keep = values.double(), mask > 0
    out, running = torch.empty_like(values), values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        running = torch.where(keep[:, t], values[:, t] + decay * running, running)
        out[:, t] = running
    return out


def next_value(values: Tensor, mask: Tensor, after_last: Tensor) -> Tensor:
    """The value at the next token under the mask, float64 `(bs, length)`; `after_last` `(bs,)` where none follows."""
    values, keep = values.double(), mask > 0
    out, following = torch.empty_like(values), after_last.double()
    for t in reversed(range(values.shape[1])):
        out[:, t] = following
        following = torch.where(keep[:, t], values[:, t], following)
    return out


def last_value(values: Tensor, mask: Tensor) -> Tensor:
    """The value at the last token under the mask, float64 `(bs,)`; 0 in a row without one."""
    values, keep = values.double(), mask > 0
    last = values.new_zeros(len(values))
    for t in range(values.shape[1]):
        last = torch.where(keep[:, t], values[:, t], last)
    return last
