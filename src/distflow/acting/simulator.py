"""Simulators that a policy acts in: their protocol, adapters, and the object in a worker process
that holds those of several episodes. It does not import torch."""

import asyncio
import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from distflow.environments.environment_adapters import find_registered, is_registered
from distflow.import_target import load
from distflow.user_values import finite_number

BUILTIN = {"gridreach": "distflow.acting.gridreach:GridReach"}
Images = Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True)
class Observation:
    """What a policy sees. images: `(H, W, 3)` by name. state: float32, one dimension. instruction:
    what to do."""

    images: Images = field(default_factory=dict)
    state: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    instruction: str = ""


class ChunkResult(NamedTuple):
    """One entry for each executed env step: as many as the chunk has, or fewer if the episode ended
    before.

    terminated: the task has ended. truncated: the time limit was reached. observation: after the
    last step.
    """

    rewards: list[float]
    terminated: list[bool]
    truncated: list[bool]
    success: list[bool]
    observation: Observation


class Simulator(Protocol):
    """An episode at a time. After an end it does nothing until the next `reset`; it never resets
    itself."""

    async def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        """Begin an episode. The same seed and options give the same state, in a used simulator
        too."""
        ...

    async def step(self, chunk: NDArray[np.float64]) -> ChunkResult:
        """Execute actions `(steps, action_dim)` until the episode ends."""
        ...


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
        named = (
            dict(observation) if isinstance(observation, Mapping) else {"observation": observation}
        )
        if absent := [name for name in self._state if name not in named]:
            raise ValueError(f"state: the observation has no '{absent[0]}', but {', '.join(named)}")
        images = dict[str, Any]()
        numbers = list[Any]()
        for name in sorted(named):
            value = np.asarray(named[name])
            if value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] == 3:
                images[name] = value
            elif name in (self._state or named):
                numbers.append(value.astype(np.float32).reshape(-1))
        if self._render:
            images["render"] = np.asarray(self._env.render())
        return Observation(
            images,
            np.concatenate(numbers) if numbers else np.zeros(0, np.float32),
            self._instruction,
        )


class SimulatorHost:
    """In a worker process: the simulators of several episodes, by key. One that ended is used
    again."""

    def __init__(self, env: str, options: Mapping[str, Any], gl: str | None = None) -> None:
        """env: see `simulator_maker`. gl: how MuJoCo renders: egl, osmesa or none. Raises
        UserError."""
        if gl is not None:
            os.environ["MUJOCO_GL"] = "disable" if gl == "none" else gl  # before it is imported
        self._make = partial(simulator_maker(env), **options)
        self._running: dict[str, tuple[Any, Observation]] = {}
        self._idle: list[Any] = []
        self._loop = asyncio.new_event_loop()

    def begin(self, key: str, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """The first observation of an episode. Raises what the simulator raises, and ValueError for
        an observation of another form."""
        simulator = self._idle.pop() if self._idle else self._make()
        first = self._loop.run_until_complete(simulator.reset(seed, options))
        check_observation(first, first)
        self._running[key] = simulator, first
        return to_json(first)

    def act(self, key: str, actions: Sequence[Sequence[float]]) -> dict[str, Any]:
        """The result of a chunk; raises as `begin`."""
        simulator, first = self._running[key]
        result = self._loop.run_until_complete(simulator.step(np.array(actions, np.float64)))
        check_result(result, len(actions))
        check_observation(result.observation, first)
        return {
            **result._asdict(),
            "rewards": [*map(float, result.rewards)],
            "observation": to_json(result.observation),
        }

    def end(self, key: str) -> None:
        self._idle.append(self._running.pop(key)[0])

    def repeats(self) -> str:
        """What differs after `reset` with the same seed, in a used simulator or a fresh one; empty
        if nothing does."""
        wanted = self.begin("first", 1, {})
        self.end("first")
        self.begin("used", 2, {})
        self.end("used")
        if self.begin("used", 1, {}) != wanted:
            return "a used simulator"
        return "" if self.begin("fresh", 1, {}) == wanted else "a fresh simulator"


def simulator_maker(env: str) -> Callable[..., Simulator]:
    """A built-in name, module:Class, file.py:function, or an id of gymnasium; module:ID imports the
    module that registers it. Raises UserError."""
    if env not in BUILTIN and is_registered(env):
        return partial(GymnasiumSimulator, find_registered(env))
    return cast(Callable[..., Simulator], load(BUILTIN.get(env, env)))


def check_observation(seen: Observation, first: Observation) -> None:
    """Raises ValueError for one that is not as the protocol says, or has another form than the
    episode's first."""
    for name, image in seen.images.items():
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise ValueError(
                f"the image '{name}' of an observation is {image.dtype} {image.shape}, not uint8 "
                "(H, W, 3)"
            )
    if not np.isfinite(np.asarray(seen.state, np.float64)).all():
        raise ValueError("the state of an observation has a number that is not finite")
    forms = [
        ({name: image.shape for name, image in each.images.items()}, each.state.shape)
        for each in (seen, first)
    ]
    if forms[0] != forms[1]:
        raise ValueError(
            f"an observation has the form {forms[0]}, but the episode's first one had {forms[1]}"
        )


def check_result(result: ChunkResult, num_actions: int) -> None:
    """Raises ValueError for a result that contradicts itself, or the number of actions."""
    steps = len(result.rewards)
    if any(len(column) != steps for column in result[:4]) or not 1 <= steps <= num_actions:
        raise ValueError(
            f"step returned {[len(column) for column in result[:4]]} entries for {num_actions} "
            "actions"
        )
    for reward in result.rewards:
        finite_number(reward, "step returned the reward")
    ended = [one or other for one, other in zip(result.terminated, result.truncated, strict=True)]
    if any(ended[:-1]):
        raise ValueError(
            f"step went on after the episode's end: it ended at {ended.index(True) + 1} of {steps} "
            "steps"
        )
    if steps < num_actions and not ended[-1]:
        raise ValueError(
            f"step executed {steps} of {num_actions} actions, and the episode has not ended"
        )


def to_json(seen: Observation) -> dict[str, Any]:
    images = {
        name: [list(image.shape), base64.b64encode(np.ascontiguousarray(image).tobytes()).decode()]
        for name, image in seen.images.items()
    }
    return {
        "images": images,
        "state": [float(each) for each in seen.state],
        "instruction": str(seen.instruction),
    }


def from_json(seen: Mapping[str, Any]) -> Observation:
    images = {
        name: np.frombuffer(base64.b64decode(content), np.uint8).reshape(shape)
        for name, (shape, content) in seen["images"].items()
    }
    return Observation(images, np.array(seen["state"], np.float32), str(seen["instruction"]))
