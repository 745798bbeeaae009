"""Moves idle engines to host memory."""

from collections.abc import Collection, Mapping

from distflow.runtime.spec import Offloads
from distflow.training.engine import TrainEngine
from distflow.training.torch_engine import FrozenWeights


class Offload:
    """Moves engines to the device as needed. Engines without offloading are left alone."""

    def __init__(
        self, engines: Mapping[str, TrainEngine | FrozenWeights], offloads: Mapping[str, Offloads]
    ) -> None:
        """engines: by role, all on the device. offloads: by role."""
        self._moving = {
            role: (engine, offloads[role]) for role, engine in engines.items() if role in offloads
        }
        self._here = set(self._moving)

    def only(self, roles: Collection[str]) -> None:
        """Only the engines of these roles are used next."""
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
        """Any engine may be used next."""
        self.only(self._moving)
