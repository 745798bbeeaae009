"""Activation checkpointing: keep each layer's input, compute the layer again in the backward pass."""

from torch import nn

from distflow.config.errors import UserError
from distflow.models.heads import unwrapped


def checkpoint_activations(model: nn.Module) -> None:
    """Switch it on, in training mode, in the form that autograd follows through packed forwards and adapters.

    Raises UserError if the family has none.
    """
    causal = unwrapped(model)
    # transformers renamed it in 5.x, and warns of the old name
    enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"enable_gradient_checkpointing is on, but {error}") from error
