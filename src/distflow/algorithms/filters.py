"""What is left out of training or punished for its length (DAPO, arXiv:2503.14476)."""

import torch
from torch import Tensor

ALL_EQUAL = "all_equal"
TOO_FEW_VERDICTS = "too_few_verdicts"


def drop_reason(metric: Tensor, valid: Tensor | None = None, min_valid: int = 2) -> str | None:
    """Why one prompt's group teaches nothing, or None if it does.

    metric: `(n,)`, one value a sample. A group with fewer than `min_valid` valid samples is `too_few_verdicts`; one
    whose valid samples all have the same metric is `all_equal`.
    """
    judged = metric if valid is None else metric[valid.bool()]
    if judged.numel() < max(min_valid, 1):
        return TOO_FEW_VERDICTS
    return ALL_EQUAL if bool(judged.max() == judged.min()) else None


def overlong_penalty(lengths: Tensor, max_response_length: int, buffer_tokens: int, factor: float = 1.0) -> Tensor:
    """Soft punishment of long answers, float32 `(bs,)`, from 0 down to −factor (DAPO, equation 13).

    lengths: response tokens. It grows linearly over the last `buffer_tokens` before `max_response_length` and is
    clipped beyond it. With `buffer_tokens` 0 there is none. Raises ValueError if the buffer exceeds the limit.
    """
    if buffer_tokens < 0 or buffer_tokens > max_response_length:
        raise ValueError(f"the overlong buffer of {buffer_tokens} tokens must lie in 0..{max_response_length}")
    if buffer_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32)
    excess = lengths.double() - (max_response_length - buffer_tokens)
    return (-(excess / buffer_tokens).clamp(0.0, 1.0) * factor).float()
