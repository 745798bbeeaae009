"""Copies of the weights of the last versions, for tokens that they generated."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
"""Trained weights by the names of the model's parameters."""


class KeptWeights:
    """The trained weights of the last versions, in the rollout engine's dtype, on the CPU.

    At most the newest `most` versions.
    """

    def __init__(self, most: int, dtype: torch.dtype) -> None:
        self._most = most
        self._dtype = dtype
        self._copies: dict[int, Weights] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def keep(self, version: int, model: nn.Module) -> None:
        """Keep the model's current weights, those of `version`, the newest."""
        copies = dict[str, Tensor]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                copies[name] = parameter.detach().to("cpu", self._dtype, copy=True)
        self._copies[version] = copies
        self.forget(version - self._most)

    def forget(self, version: int) -> None:
        """Drop that version and older ones, whose tokens will not be checked any more."""
        self._copies = {other: copy for other, copy in self._copies.items() if other > version}

    def of(self, version: int) -> Weights | None:
        """The weights of a version, None if they were not kept."""
        return self._copies.get(version)
