"""Optimizers by name, over float32 parameters."""

from collections.abc import Iterable

import torch
from torch import nn

from distflow.config.errors import UserError

OPTIMIZERS = ("adamw", "adamw_8bit", "sgd")


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """An optimizer over the parameters that require a gradient.

    "adamw" (arXiv 1711.05101), "adamw_8bit" (its moments in 8 bits, by bitsandbytes), "sgd" (without
    momentum).
    Weight decay is on every parameter, norms and biases included, as in the systems we compare with.
    Raises UserError for an unknown name, a missing package, or nothing to train.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise UserError("the model has no parameter that requires a gradient: nothing would be trained")
    if name == "adamw":
        return torch.optim.AdamW(trainable, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=lr, weight_decay=weight_decay)
    if name == "adamw_8bit":
        return _adamw_8bit(trainable, lr, weight_decay, betas, eps)
    raise UserError(f"unknown optimizer '{name}'; there are: {', '.join(OPTIMIZERS)}")


def _adamw_8bit(
    trainable: list[nn.Parameter], lr: float, weight_decay: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise UserError("optimizer 'adamw_8bit' needs the extra: pip install 'distflow[optim8bit]'") from error
    return AdamW8bit(trainable, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
