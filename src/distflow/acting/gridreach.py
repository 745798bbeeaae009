"""`gridreach`: reach the target that the instruction names, on a grid of 5 x 5 cells, from an image
of 20 x 20 pixels. The task of the tests and of the tutorial."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distflow.acting.simulator import ChunkResult, Observation

CELLS = 5
CELL_PIXELS = 4
COLOURS = {"red": (230, 40, 40), "blue": (50, 80, 230)}
_AGENT = (240, 240, 240)


class GridReach:
    """An action `(2,)` moves the agent by -1, 0 or 1 cells down and to the right. Entering the
    named target is a success; entering the other one ends the episode too, as do `max_steps`."""

    def __init__(self, max_steps: int = 8, swap: bool = False) -> None:
        """swap: show the wrong instruction, to measure what a policy owes to it."""
        self._max_steps = max_steps
        self._swap = swap
        # of the agent, and of the targets in the order of `COLOURS`
        self._places = np.zeros((3, 2), np.int64)
        self._goal = self._num_steps = 0
        self._ended = True

    async def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        draws = np.random.default_rng(seed)
        self._places = np.stack(np.divmod(draws.permutation(CELLS * CELLS)[:3], CELLS), axis=1)
        drawn = int(draws.integers(2))

        named = options.get("instruction")
        self._goal = [*COLOURS].index(named) if named in COLOURS else drawn

        self._num_steps = 0
        self._ended = False
        return self._seen()

    async def step(self, chunk: NDArray[np.float64]) -> ChunkResult:
        rewards = list[float]()
        terminated = list[bool]()
        truncated = list[bool]()
        for action in chunk:
            if self._ended:
                break

            self._num_steps += 1
            moved = self._places[0] + np.clip(np.rint(action), -1, 1).astype(np.int64)
            self._places[0] = np.clip(moved, 0, CELLS - 1)
            reached = [bool((self._places[0] == place).all()) for place in self._places[1:]]
            is_late = self._num_steps >= self._max_steps
            rewards.append(float(reached[self._goal]))
            terminated.append(any(reached))
            truncated.append(is_late and not any(reached))
            self._ended = any(reached) or is_late

        success = [reward == 1.0 for reward in rewards]
        return ChunkResult(rewards, terminated, truncated, success, self._seen())

    def shortest(self) -> list[tuple[int, ...]]:
        """Actions of the shortest way to the named target that nears it first, past the other one,
        for examples."""
        place, goal, other = self._places[[0, 1 + self._goal, 2 - self._goal]]
        way = list[tuple[int, ...]]()
        moves = np.array([*itertools.product((-1, 0, 1), repeat=2)])

        while (place != goal).any():
            to = place + moves
            to = to[(to != other).any(1) & (abs(to - CELLS // 2) <= CELLS // 2).all(1)]
            nearest = min(to, key=lambda after: sorted(abs(goal - after), reverse=True))
            way.append(tuple((nearest - place).tolist()))
            place = nearest

        return way

    def _seen(self) -> Observation:
        pixels = np.full((CELLS, CELLS, 3), 20, np.uint8)
        colours = (_AGENT, *COLOURS.values())
        for number in (2, 1, 0):  # the agent hides what it stands on
            pixels[tuple(self._places[number])] = colours[number]
        image = pixels.repeat(CELL_PIXELS, axis=0).repeat(CELL_PIXELS, axis=1)
        shown = self._goal ^ self._swap
        return Observation({"image": image}, np.zeros(0, np.float32), [*COLOURS][shown])
