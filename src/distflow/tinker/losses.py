"""The losses of the Tinker API: raw sums over the tokens of one sequence, as its documentation
defines them (tinker-docs.thinkingmachines.ai/losses).

Each takes the log-probs of the targets, `(n,)` or `(n, k)`, with gradient, and the datum's inputs,
each float32 of that shape.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Settings = Mapping[str, float]
CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


class Loss(NamedTuple):
    """A loss, and what it reads."""

    compute: Callable[[Tensor, Inputs, Settings], Tensor]
    inputs: tuple[str, ...]
    """Beside `target_tokens`."""
    settings: Settings
    """The keys of `loss_fn_config`, with their defaults."""


def cross_entropy(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -(log_probs * inputs["weights"]).sum()


def importance_sampling(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return -(_ratio(log_probs, inputs) * inputs["advantages"]).sum()


def ppo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    return _clipped(_ratio(log_probs, inputs), inputs["advantages"], settings)


def cispo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """The clipped ratio is a weight without gradient."""
    weight = _clamp(_ratio(log_probs, inputs), settings).detach()
    return -(weight * log_probs * inputs["advantages"]).sum()


def dro(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    distance = (log_probs - inputs["logprobs"]).square()
    return -(log_probs * inputs["advantages"] - 0.5 * settings["beta"] * distance).sum()


def gspo(log_probs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """Each token has the value of the sequence's ratio, over the tokens of `sequence_ratio_mask`,
    and the gradient of its own log-prob."""
    counts = inputs["sequence_ratio_mask"] != 0
    if not bool(counts.any()):
        raise ValueError("sequence_ratio_mask marks no token")

    held = log_probs.detach()
    of_sequence = (held - inputs["logprobs"])[counts].mean()
    return _clipped((of_sequence + log_probs - held).exp(), inputs["advantages"], settings)


def _ratio(log_probs: Tensor, inputs: Inputs) -> Tensor:
    return (log_probs - inputs["logprobs"]).exp()


def _clamp(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _clipped(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    clipped = _clamp(ratio, settings) * advantages
    return -torch.minimum(ratio * advantages, clipped).sum()


_OF_RL: Final = ("logprobs", "advantages")
LOSSES: Final = {
    "cross_entropy": Loss(cross_entropy, ("weights",), {}),
    "importance_sampling": Loss(importance_sampling, _OF_RL, {}),
    "ppo": Loss(ppo, _OF_RL, CLIP),
    "cispo": Loss(cispo, _OF_RL, CLIP),
    "dro": Loss(dro, _OF_RL, {"beta": 0.05}),
    "gspo": Loss(gspo, (*_OF_RL, "sequence_ratio_mask"), CLIP),
}
