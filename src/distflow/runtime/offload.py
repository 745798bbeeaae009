"""Offloading of train engines to host memory, as the config says, while another engine or generation runs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distflow.training.engine import TrainEngine


@dataclass(frozen=True)
class Offloads:
    """The parts of an engine that are in host memory while it is not used."""

    weights: bool
    moments: bool


class Offload:
    """Moves engines as they are needed. Engines of which nothing is offloaded are not touched."""

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
