"""The clipped value loss of PPO (arXiv:1707.06347; clipping as in the original code)."""

import torch
from torch import Tensor

from distflow.algorithms.masking import under_mask


def compute_value_loss(
    predictions: Tensor, values: Tensor, returns: Tensor, loss_mask: Tensor, *, cliprange_value: float | None = 0.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((v − R)², (clip(v, v_old ± cliprange_value) − R)²) / 2 per token, all `(bs, response_length)`.

    predictions: v, with gradient. values: v_old. `cliprange_value` None turns the clip off.
    """
    predictions, values, returns = (under_mask(x, loss_mask) for x in (predictions, values, returns))
    plain = (predictions - returns).square()
    if cliprange_value is None:
        return 0.5 * plain, {"vpred_mean": predictions.detach()}
    near = predictions.clamp(values - cliprange_value, values + cliprange_value)
    clipped = (near - returns).square()
    stats = {"vf_clipfrac": (clipped > plain).to(plain.dtype), "vpred_mean": predictions.detach()}
    return 0.5 * torch.maximum(plain, clipped), stats
