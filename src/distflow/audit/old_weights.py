"""Copies of the policy's weights at each sync, for audits of tokens that older versions generated."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from distflow.rollout.weights import stripe_hashes

Weights = Mapping[str, Tensor]
"""Trained weights by the names of the model's parameters."""


class KeptWeights:
    """The trained weights of the last versions, in the rollout engine's dtype, on the CPU.

    At most `most` at a time, the newest; versions whose weights are the same share one copy.
    """

    def __init__(self, most: int, dtype: torch.dtype) -> None:
        self._most, self._dtype = most, dtype
        self._copies: dict[int, Weights] = {}
        self._last: Mapping[str, str] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, version: int, model: nn.Module) -> None:
        """The model's present weights are those of `version`, the newest."""
        own = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
        hashes = stripe_hashes(own.items())
        if hashes == self._last and self._copies:
            self._copies[version] = self._copies[max(self._copies)]
        else:
            self._copies[version] = {name: w.to("cpu", self._dtype, copy=True) for name, w in own.items()}
        self._last = hashes
        self.forget(version - self._most)

    def forget(self, version: int) -> None:
        """Drop that version and older ones: their tokens will not be audited any more."""
        self._copies = {kept: copy for kept, copy in self._copies.items() if kept > version}

    def of(self, version: int) -> Weights | None:
        """The weights of a version, None if they were not kept."""
        return self._copies.get(version)
