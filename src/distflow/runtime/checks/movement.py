"""Claims: every trained tensor moves, and every loss term that is on contributes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from distflow.rollout.receipts import stripe_hashes
from distflow.training.engine import TrainEngine


@dataclass
class Movement:
    """Finds trained tensors that no update moved.

    after: updates with a gradient and a learning rate above 0 to wait for.
    """

    after: int
    _start: dict[str, str] | None = None
    _updates: int = 0

    def updated(self, engine: TrainEngine, metrics: Mapping[str, float]) -> list[str]:
        """Call after each update; once, after `after` of them, the names of tensors that are where they began."""
        if self._updates >= self.after:
            return []
        if self._start is None:
            self._start = stripe_hashes(engine.state().trained_weights().items())
            return []
        if metrics.get("lr", 0) > 0 and metrics.get("grad_norm", 0) > 0 and not metrics.get("skipped"):
            self._updates += 1
        if self._updates < self.after:
            return []
        now = stripe_hashes(engine.state().trained_weights().items())
        return [name for name, before in self._start.items() if now[name] == before]


@dataclass
class LossTerms:
    """Finds loss terms that are on and contribute exactly 0 in each of the first steps.

    names: the metrics that hold what each term that is on contributed.
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
