"""How the audit runs models: sharded ones with all ranks in each pass, older versions from copies of their weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distflow.audit.plain_model import plainly
from distflow.models.sharding import is_spread, own_part
from distflow.rollout.weights import stripe_hashes
from distflow.training.engine import Collective

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


class Turns:
    """Runs one rank's passes over models, sharded or whole.

    Before each pass over a sharded model the ranks agree on the next pass; a rank that needs another one, or none,
    runs a single token, so that its shard of the weights is available. Whole models are run at once.
    """

    def __init__(self, group: Collective, models: Iterable[nn.Module]) -> None:
        """group: the ranks that models are sharded over; all pass the same models in the same order."""
        self._group = group
        self._spread = [model for model in dict.fromkeys(models) if is_spread(model)]

    def run(self, model: nn.Module, **inputs: object) -> Any:
        """The model's own forward; without gradient if it is sharded."""
        if model not in self._spread:
            return model(**inputs)
        self._wait_for(2 * self._spread.index(model) + 1)
        with torch.no_grad():
            return model(**inputs)

    def gradients(self, model: nn.Module, weights: Sequence[nn.Parameter], loss: Callable[[], Tensor]) -> list[Tensor]:
        """Gradients of a scalar by some of the model's weights; for a sharded model this rank's part, of the sum of all
        ranks' scalars; all ranks call it equally often. Existing `.grad`s stay as they are.

        Raises RuntimeError if another rank failed and does not take part.
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
        """This rank has no more passes: take part in those of other ranks until they have none."""
        if self._spread:
            self._wait_for(0)

    def _wait_for(self, wanted: int) -> bool:
        """Wait until that pass is next; returns whether all ranks make it. A pass is numbered 2 × the model's index +
        1, one more with gradient; 0 is none."""
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
    """Inside, the model starts without gradients; afterwards it has its old ones."""
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        model.zero_grad(set_to_none=True)
        yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient
