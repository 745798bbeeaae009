"""Which train engines are on the device: what the config offloads of one waits in the host's memory while another, or
generation, has the device."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distflow.training.engine import TrainEngine


@dataclass(frozen=True)
class Offloads:
    """What of an engine waits in the host's memory while it is not used."""

    weights: bool
    moments: bool


class Offload:
    """Moves engines as they are needed. Those of which nothing is offloaded are never asked."""

    def __init__(self, engines: Mapping[str, TrainEngine], offloads: Mapping[str, Offloads]) -> None:
        """engines: by role, all on the device. offloads: by role."""
        self._moving = {role: (engine, offloads[role]) for role, engine in engines.items() if role in offloads}
        self._here = set(self._moving)

    def only(self, roles: Collection[str]) -> None:
        """The engines of these roles are used next, and no other."""
        for role, (engine, what) in self._moving.items():
            if role not in roles and role in self._here:
                engine.offload(weights=what.weights, moments=what.moments)
                self._here.remove(role)
        for role, (engine, what) in self._moving.items():
            if role in roles and role not in self._here:
                if what.weights:
                    engine.onload()
                self._here.add(role)

    def all(self) -> None:
        """Any of them may be used next."""
        self.only(self._moving)
