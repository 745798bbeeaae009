"""Runs of models whose weights lie over ranks: all ranks make each one together, and each has its own to make."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distflow.audit.plain_model import plainly
from distflow.models.shards import is_spread, own_part
from distflow.training.collective import Collective


class Turns:
    """What one rank asks of models, spread or whole.

    Before each pass over a spread one the ranks agree on which is next; who needs another, or none any more, sends a
    token through it, so that its part of the weights is there. Whole models are run at once.
    """

    def __init__(self, group: Collective, models: Iterable[nn.Module]) -> None:
        """group: the ranks that models lie over; all are given the same models in the same order."""
        self._group = group
        self._spread = [model for model in dict.fromkeys(models) if is_spread(model)]

    def run(self, model: nn.Module, **inputs: object) -> Any:
        """The model's own forward, without gradient where it is spread."""
        if model not in self._spread:
            return model(**inputs)
        self._wait_for(2 * self._spread.index(model) + 1)
        with torch.no_grad():
            return model(**inputs)

    def gradients(self, model: nn.Module, weights: Sequence[nn.Parameter], loss: Callable[[], Tensor]) -> list[Tensor]:
        """Of a number by some of the model's weights: of a spread model this rank's part, for the sum of what the ranks
        give, which all ask for it as often. Gradients that are kept already stay as they are.

        Raises RuntimeError where another rank does not take part, since it failed.
        """
        if model not in self._spread:
            found = torch.autograd.grad(loss(), weights, allow_unused=True)
            return [torch.zeros_like(w) if g is None else g.detach() for w, g in zip(weights, found, strict=True)]
        if not self._wait_for(2 * self._spread.index(model) + 2):
            raise RuntimeError("another rank failed in this check")
        with _without_gradients(model):
            loss().backward()
            return [torch.zeros_like(own_part(w)) if w.grad is None else own_part(w.grad) for w in weights]

    def is_spread(self, model: nn.Module) -> bool:
        return model in self._spread

    def finish(self) -> None:
        """This rank has no pass to make: wait until no other has, and lend it this part of the weights."""
        if self._spread:
            self._wait_for(0)

    def _wait_for(self, wanted: int) -> bool:
        """Until it is the turn of that pass; whether all ranks make it then. A pass is 2 × the model's place + 1, with
        gradient one more; 0 is none."""
        while True:
            turn = int(self._group.max(float(wanted)))
            num_takers = self._group.sum(float(turn == wanted))
            if turn == wanted:
                return num_takers == self._group.size
            if turn % 2:
                self._lend(self._spread[turn // 2])

    def _lend(self, model: nn.Module) -> None:
        token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        with plainly(model), torch.no_grad():
            model(input_ids=token, use_cache=False)


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, the model begins with none; behind it has those that it had."""
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        model.zero_grad(set_to_none=True)
        yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient
