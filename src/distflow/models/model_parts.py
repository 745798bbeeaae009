"""The parts of a Hugging Face model: the decoder, and the head that turns its hidden states into logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def unwrapped(model: nn.Module) -> Any:
    """The `transformers` model itself, below an adapter's wrapper; its adapted layers stay in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # peft's


def backbone(model: nn.Module) -> nn.Module:
    """The decoder without its head."""
    return unwrapped(model).base_model


def output_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Hidden states `(n, hidden)` → logits `(n, vocabulary)`, or `(n, 1)` for a value model.

    With the scale or soft cap of the families that have one. `check_packed_forward` compares with the model's own
    logits, so a family with another rule is refused, not wrong.
    """
    causal = unwrapped(model)
    config = causal.config
    head = causal.get_output_embeddings()
    if head is None:
        return causal.score
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        out = head(hidden)
        if scale != 1.0:
            out = out * scale
        return softcap * torch.tanh(out / softcap) if softcap else out

    return logits


def token_values(model: nn.Module, hidden: Tensor) -> Tensor:
    """Values `(n,)` of a value model's hidden states `(n, width)`, in float32 at least."""
    values = output_head(model)(hidden)[:, 0]
    return values if values.dtype == torch.float64 else values.float()
