"""An environment of gymnasium as a simulator."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distflow.acting.simulator import ChunkResult, Observation


class GymnasiumSimulator:
    """An environment of gymnasium with spaces of Box, Dict or Discrete. uint8 arrays `(H, W, 3)` of
    an observation are images, all other numbers are its state, in the order of their names."""

    def __init__(
        self,
        make: Callable[..., Any],
        instruction: str = "",
        render: bool = False,
        state: Sequence[str] = (),
        ends_at_success: bool = False,
        seed_argument: str = "",
        **options: Any,
    ) -> None:
        """instruction: what to do, since gymnasium has no word for it. render: also show the
        picture of `render`. state: the entries of a Dict observation that the state has; all by
        default. ends_at_success: a success ends the episode. seed_argument: each `reset` makes a
        new environment, with the seed as this argument, for those whose own `reset` does not repeat
        a state."""
        self._make = partial(make, **options, **({"render_mode": "rgb_array"} if render else {}))
        self._env: Any = None if seed_argument else self._make()
        self._instruction = instruction
        self._render = render
        self._state = tuple(state)
        self._ends_at_success = ends_at_success
        self._seed_argument = seed_argument

    async def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        if self._seed_argument:
            self.close()
            self._env = self._make(**{self._seed_argument: seed})
        observation, _ = self._env.reset(seed=seed, options=dict(options))
        return self._seen(observation)

    async def step(self, chunk: NDArray[np.float64]) -> ChunkResult:
        space = self._env.action_space
        steps = list[tuple[float, bool, bool, bool]]()
        for numbers in chunk:
            if hasattr(space, "n"):
                action: Any = int(round(float(numbers[0])))
            else:
                action = numbers.reshape(space.shape).astype(space.dtype)

            if not space.contains(action):
                raise ValueError(f"the action {action!r} is not in the environment's space {space}")

            observation, reward, terminated, truncated, info = self._env.step(action)
            success = bool(info.get("is_success", info.get("success", False)))
            terminated = bool(terminated) or (success and self._ends_at_success)
            steps.append((reward, terminated, bool(truncated), success))
            if terminated or truncated:
                break

        rewards, ends, cuts, won = map(list, zip(*steps, strict=True))
        return ChunkResult(rewards, ends, cuts, won, self._seen(observation))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _seen(self, observation: Any) -> Observation:
        named = {"observation": observation}
        if isinstance(observation, Mapping):
            named = dict(observation)

        for name in self._state:
            if name not in named:
                raise ValueError(f"state: the observation has no '{name}', but {', '.join(named)}")

        images = dict[str, Any]()
        numbers = [np.zeros(0, np.float32)]
        for name in sorted(named):
            value = np.asarray(named[name])
            if value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] == 3:
                images[name] = value
            elif name in (self._state or named):
                numbers.append(value.astype(np.float32).reshape(-1))

        if self._render:
            images["render"] = np.asarray(self._env.render())
        return Observation(images, np.concatenate(numbers), self._instruction)
