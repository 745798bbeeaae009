"""Checks of every update: each trained tensor moves, and each enabled loss term contributes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from distflow.models.model_identity import bit_hash
from distflow.models.sharding import on_any_rank, own_part
from distflow.training.engine import TrainEngine, TrainState


@dataclass
class Movement:
    """Finds trained tensors that no update moved, or that only weight decay moved.

    after: how many updates with a gradient and a learning rate above 0 to wait for. Warm-up updates
    do not count: they can be too small for float32 to change a weight of 1.
    """

    after: int
    _start: dict[str, str] | None = None
    _updates: int = 0
    _lr: float = 0.0

    def updated(self, engine: TrainEngine, metrics: Mapping[str, float]) -> list[str]:
        """Call after each update; once, after `after` of them, the names of tensors that training
        does not reach."""
        if self._updates >= self.after:
            return []

        lr = self._lr
        self._lr = metrics.get("lr", 0.0)
        if self._start is None:
            self._start = fingerprints(engine.state())
            return []

        if 0 < self._lr <= lr and metrics.get("grad_norm", 0) > 0 and not metrics.get("skipped"):
            self._updates += 1
        if self._updates < self.after:
            return []

        state = engine.state()
        weights = state.trained_weights()
        now = fingerprints(state)
        moved = on_any_rank(
            {name: now[name] != before for name, before in self._start.items()}, weights
        )
        pushed = on_any_rank({name: _had_gradient(state, name) for name in self._start}, weights)

        return [name for name in self._start if not (moved[name] and pushed[name])]


@dataclass
class LossTerms:
    """Finds enabled loss terms that contribute exactly 0 in each of the first steps. names: their
    metrics."""

    names: tuple[str, ...]
    after: int = 5
    _seen: int = 0
    _alive: set[str] = field(default_factory=set)

    def updated(self, metrics: Mapping[str, float]) -> list[str]:
        """Call once per trained step; returns once, after `after` steps, the terms that were always
        exactly 0."""
        if self._seen >= self.after:
            return []

        self._seen += 1
        self._alive |= {name for name in self.names if metrics.get(name, 0.0) != 0.0}
        if self._seen == self.after:
            return [name for name in self.names if name not in self._alive]

        return []


def fingerprints(state: TrainState) -> dict[str, str]:
    """A hash of all bits of each trained tensor, or of this rank's part of a sharded one."""
    return {name: bit_hash(tensor) for name, tensor in state.trained_weights().items()}


def _had_gradient(state: TrainState, name: str) -> bool:
    """Whether a moment of this tensor (named "key/NAME") is not exactly 0; true if the optimizer
    keeps no moments."""
    moments = [
        own_part(t) for key, t in state.tensors.items() if key.endswith(f"/{name}") and t.dim() > 0
    ]
    return not moments or any(bool(t.any()) for t in moments)
