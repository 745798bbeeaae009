"""The object in a worker process that holds a simulator. It does not import torch."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from distflow.acting.gymnasium_simulator import GymnasiumSimulator
from distflow.acting.simulator import (
    Observation,
    Simulator,
    check_observation,
    check_result,
    to_json,
)
from distflow.environments.environment_adapters import find_registered, is_registered
from distflow.import_target import load

BUILTIN = {"gridreach": "distflow.acting.gridreach:GridReach"}


class SimulatorHost:
    """In a process: the simulator of one episode at a time, which later episodes use again."""

    def __init__(self, env: str, options: Mapping[str, Any], gl: str | None = None) -> None:
        """env: see `simulator_maker`. gl: how MuJoCo renders: egl, osmesa or none. Raises
        UserError."""
        if gl is not None:
            os.environ["MUJOCO_GL"] = "disable" if gl == "none" else gl  # before it is imported
        self._make = partial(simulator_maker(env), **options)
        self._simulator: Any = None
        self._first = Observation()
        self._loop = asyncio.new_event_loop()

    def begin(self, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """The first observation of an episode. Raises what the simulator raises, and ValueError for
        an observation of another form."""
        if self._simulator is None:
            self._simulator = self._make()
        self._first = self._loop.run_until_complete(self._simulator.reset(seed, options))
        check_observation(self._first, self._first)
        return to_json(self._first)

    def act(self, actions: Sequence[Sequence[float]]) -> dict[str, Any]:
        """The result of a chunk; raises as `begin`."""
        chunk = np.array(actions, np.float64)
        result = self._loop.run_until_complete(self._simulator.step(chunk))
        check_result(result, len(actions))
        check_observation(result.observation, self._first)

        return {
            **result._asdict(),
            "rewards": [*map(float, result.rewards)],
            "observation": to_json(result.observation),
        }

    def repeats(self) -> str:
        """What differs after `reset` with the same seed, in a used simulator or a fresh one; empty
        if nothing does."""
        wanted = self.begin(1, {})
        self.begin(2, {})
        if self.begin(1, {}) != wanted:
            return "a used simulator"

        self._simulator = None
        if self.begin(1, {}) == wanted:
            return ""
        return "a fresh simulator"


def simulator_maker(env: str) -> Callable[..., Simulator]:
    """A built-in name, module:Class, file.py:function, or an id of gymnasium; module:ID imports the
    module that registers it. Raises UserError."""
    if env not in BUILTIN and is_registered(env):
        return partial(GymnasiumSimulator, find_registered(env))
    return cast(Callable[..., Simulator], load(BUILTIN.get(env, env)))
