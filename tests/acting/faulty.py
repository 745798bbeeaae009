"""Simulators for the tests: good ones, and some that break the protocol."""

import os
import time
from typing import Any

import numpy as np

from distflow.acting.simulator import ChunkResult, Observation


class Line:
    """A place on a line, moved by each action; the episode ends after `ends_at` steps, well or by
    its time limit."""

    def __init__(self, ends_at: int = 3, success: bool = True, images: bool = False) -> None:
        self.ends_at = ends_at
        self.success = success
        self.images = images

    def seen(self) -> Observation:
        image = {"front": np.full((6, 6, 3), self.steps, np.uint8)} if self.images else {}
        return Observation(image, np.array([self.place], np.float32), "go")

    async def reset(self, seed: int, options: Any) -> Observation:
        self.place = float(seed)
        self.steps = 0
        return self.seen()

    async def step(self, chunk: Any) -> ChunkResult:
        rewards = list[float]()
        ends = list[bool]()
        for action in chunk:
            self.place = self.place + float(action[0])
            self.steps = self.steps + 1
            rewards.append(0.5)
            ends.append(self.steps >= self.ends_at)
            if ends[-1]:
                break

        won = [end and self.success for end in ends]
        return ChunkResult(
            rewards, won, [end and not self.success for end in ends], won, self.seen()
        )


class Pays(Line):
    """Pays the first number of each action."""

    async def step(self, chunk: Any) -> ChunkResult:
        result = await super().step(chunk)
        return result._replace(
            rewards=[float(action[0]) for action in chunk[: len(result.rewards)]]
        )


class Unseeded(Line):
    async def reset(self, seed: int, options: Any) -> Observation:
        await super().reset(seed, options)
        self.place = float(np.random.default_rng().random())
        return self.seen()


class Remembers(Line):
    """A used one begins where the last episode ended."""

    place = 0.0

    async def reset(self, seed: int, options: Any) -> Observation:
        before = self.place
        await super().reset(seed, options)
        self.place += before
        return self.seen()


class Fails(Line):
    """Fails in the step after a reset with an odd seed, in the way of `how`."""

    def __init__(self, how: str) -> None:
        super().__init__(ends_at=8)
        self.how = how

    async def step(self, chunk: Any) -> ChunkResult:
        result = await super().step(chunk)
        if self.place < 100:
            return result

        if self.how == "dies":
            os._exit(3)
        if self.how == "hangs":
            time.sleep(1000)
        changes: dict[str, Any] = {
            "nan reward": {"rewards": [float("nan")] * len(result.rewards)},
            "goes on": {"terminated": [True] * len(result.rewards)},
            "stops": {
                name: getattr(result, name)[:1]
                for name in ("rewards", "terminated", "truncated", "success")
            },
            "nan state": {"observation": Observation(state=np.array([np.nan], np.float32))},
            "other form": {"observation": Observation(state=np.zeros(2, np.float32))},
            "float image": {
                "observation": Observation({"front": np.zeros((2, 2, 3))}, np.zeros(1, np.float32))
            },
        }

        return result._replace(**changes[self.how])


class NoScreen(Line):
    def __init__(self) -> None:
        raise RuntimeError("gladLoadGL error: no OpenGL context")
