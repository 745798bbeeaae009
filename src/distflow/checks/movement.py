"""Checks: every trained tensor moves, and every loss term that is on contributes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distflow.models.sharding import on_any_rank, own_part
from distflow.training.engine import TrainEngine, TrainState

CHUNK = 2**24
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Movement:
    """Finds trained tensors that no update moved, or that only weight decay moved.

    after: updates with a gradient and a learning rate above 0 to wait for. Updates of the
    warm-up do not count: such a step can be too small for float32 to change a weight of 1.
    """

    after: int
    _start: dict[str, int] | None = None
    _updates: int = 0
    _lr: float = 0.0

    def updated(self, engine: TrainEngine, metrics: Mapping[str, float]) -> list[str]:
        """Call after each update; once, after `after` of them, the names of tensors that training does not reach."""
        if self._updates >= self.after:
            return []
        lr, self._lr = self._lr, metrics.get("lr", 0.0)
        if self._start is None:
            self._start = fingerprints(engine.state())
            return []
        if 0 < self._lr <= lr and metrics.get("grad_norm", 0) > 0 and not metrics.get("skipped"):
            self._updates += 1
        if self._updates < self.after:
            return []
        state = engine.state()
        weights, now = state.trained_weights(), fingerprints(state)
        moved = on_any_rank({name: now[name] != before for name, before in self._start.items()}, weights)
        pushed = on_any_rank({name: _had_gradient(state, name) for name in self._start}, weights)
        return [name for name in self._start if not (moved[name] and pushed[name])]


def fingerprints(state: TrainState) -> dict[str, int]:
    """A number for each trained tensor that depends on all its bits; for a sharded tensor on this rank's part."""
    return {name: _fingerprint(tensor) for name, tensor in state.trained_weights().items()}


def _fingerprint(tensor: Tensor) -> int:
    """The sum of its bits as integers, weighted by odd numbers, so that changes of opposite sign do not cancel."""
    bits = own_part(tensor.detach()).contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = 0
    for chunk in bits.split(CHUNK):
        weights = torch.arange(1, 2 * chunk.numel() + 1, 2, device=chunk.device)
        total = 31 * total + int((chunk.long() * weights).sum())
    return total


def _had_gradient(state: TrainState, name: str) -> bool:
    """Whether a moment of this tensor (named "key/NAME") is not exactly 0; true if the optimizer keeps no moments."""
    moments = [own_part(t) for key, t in state.tensors.items() if key.endswith(f"/{name}") and t.dim() > 0]
    return not moments or any(bool(t.any()) for t in moments)


@dataclass
class LossTerms:
    """Finds loss terms that are on and contribute exactly 0 in each of the first steps.

    names: the metrics of the terms that are on.
    """

    names: tuple[str, ...]
    after: int = 5
    _seen: int = 0
    _alive: set[str] = field(default_factory=set)

    def updated(self, metrics: Mapping[str, float]) -> list[str]:
        """Call once a trained step; after `after` of them, once, the terms that were always exactly 0."""
        if self._seen >= self.after:
            return []
        self._seen += 1
        self._alive |= {name for name in self.names if metrics.get(name, 0.0) != 0.0}
        return [name for name in self.names if name not in self._alive] if self._seen == self.after else []
