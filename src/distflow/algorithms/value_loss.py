"""The clipped value loss of PPO (arXiv:1707.06347; clipping as in the original code), of squares or Huber's."""

from typing import Literal

import torch
from torch import Tensor

from distflow.algorithms.masking import under_mask

ValueLoss = Literal["mse", "huber"]


def compute_value_loss(
    predictions: Tensor,
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    cliprange_value: float | None = 0.5,
    value_loss: ValueLoss = "mse",
    huber_delta: float = 10.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(ℓ(v − R), ℓ(clip(v, v_old ± cliprange_value) − R)) per token, all `(bs, response_length)`.

    predictions: v, with gradient. values: v_old. `cliprange_value` None turns the clip off. ℓ(x) is x² / 2; with
    `huber` it is so for |x| ≤ huber_delta and huber_delta · (|x| − huber_delta / 2) beyond (Huber 1964), as in AReaL.
    """
    predictions, values, returns = (under_mask(x, loss_mask) for x in (predictions, values, returns))
    plain = _loss(predictions - returns, value_loss, huber_delta)
    if cliprange_value is None:
        return plain, {"vpred_mean": predictions.detach()}
    near = predictions.clamp(values - cliprange_value, values + cliprange_value)
    clipped = _loss(near - returns, value_loss, huber_delta)
    stats = {"vf_clipfrac": (clipped > plain).to(plain.dtype), "vpred_mean": predictions.detach()}
    return torch.maximum(plain, clipped), stats


def _loss(error: Tensor, value_loss: ValueLoss, huber_delta: float) -> Tensor:
    square = 0.5 * error.square()
    if value_loss == "mse":
        return square
    size = error.abs()
    return torch.where(size <= huber_delta, square, huber_delta * (size - 0.5 * huber_delta))
