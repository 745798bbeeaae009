"""Passes over models of which each rank may have a shard."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from distflow.checks.plain_forward import plainly
from distflow.models.sharding import is_spread
from distflow.training.engine import Collective


class ShardedPasses:
    """Runs one rank's passes over models, sharded or whole.

    Before each pass over a sharded model the ranks agree on the next pass; a rank that needs
    another one, or none, runs a single token, so that its shard of the weights is available. Whole
    models are run immediately.
    """

    def __init__(self, group: Collective, models: Iterable[nn.Module]) -> None:
        """group: the ranks that models are sharded over; all ranks pass the same models in the same
        order."""
        self._group = group
        self._spread = [model for model in dict.fromkeys(models) if is_spread(model)]

    def is_spread(self, model: nn.Module) -> bool:
        return model in self._spread

    def run(self, model: nn.Module, **inputs: object) -> Any:
        """The model's own forward; without gradient if it is sharded."""
        if model not in self._spread:
            return model(**inputs)
        self._wait_for(1 + self._spread.index(model))
        with torch.no_grad():
            return model(**inputs)

    def finish(self) -> None:
        """Called when this rank has no more passes: take part in those of other ranks until they
        have none."""
        if self._spread:
            self._wait_for(0)

    def _wait_for(self, wanted: int) -> None:
        """Wait until that pass is next: 1 + the model's index, or 0 for none."""
        while (turn := int(self._group.max(float(wanted)))) != wanted:
            model = self._spread[turn - 1]
            token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
            with plainly(model), torch.no_grad():
                model(input_ids=token, use_cache=False)
