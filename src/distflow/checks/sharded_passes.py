"""Passes over models of which each rank may have a shard."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distflow.checks.plain_forward import plainly
from distflow.models.sharding import is_spread, own_part
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
        self._wait_for(2 * self._spread.index(model) + 1)
        with torch.no_grad():
            return model(**inputs)

    def gradients(
        self, model: nn.Module, weights: Sequence[nn.Parameter], loss: Callable[[], Tensor]
    ) -> list[Tensor]:
        """Gradients of a scalar with respect to some of the model's weights; for a sharded model,
        this rank's part for the sum of all ranks' scalars, and all ranks must call it equally
        often. Existing `.grad`s are unchanged.

        Raises RuntimeError if another rank failed and does not take part.
        """
        if model not in self._spread:
            return list(
                torch.autograd.grad(loss(), weights, allow_unused=True, materialize_grads=True)
            )
        if not self._wait_for(2 * self._spread.index(model) + 2):
            raise RuntimeError("another rank failed in this check")
        gradients = {parameter: parameter.grad for parameter in model.parameters()}
        try:
            model.zero_grad(set_to_none=True)
            loss().backward()
            return [
                torch.zeros_like(own_part(w)) if w.grad is None else own_part(w.grad)
                for w in weights
            ]
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def finish(self) -> None:
        """Called when this rank has no more passes: take part in those of other ranks until they
        have none."""
        if self._spread:
            self._wait_for(0)

    def _wait_for(self, wanted: int) -> bool:
        """Wait until that pass is next; returns whether all ranks make it. A pass has the number 2
        × the model's index + 1, plus 1 with gradient; 0 is none."""
        while True:
            turn = int(self._group.max(float(wanted)))
            num_takers = self._group.sum(float(turn == wanted))
            if turn == wanted:
                return num_takers == self._group.size
            if turn % 2:
                model = self._spread[turn // 2]
                token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
                with plainly(model), torch.no_grad():
                    model(input_ids=token, use_cache=False)
