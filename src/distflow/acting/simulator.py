"""The protocol of simulators that a policy acts in, and what it demands of their answers."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from distflow.user_values import finite_number

Images = Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True)
class Observation:
    """What a policy sees."""

    images: Images = field(default_factory=dict)
    """`(H, W, 3)` by name."""
    state: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """One dimension."""
    instruction: str = ""
    """What to do."""


class ChunkResult(NamedTuple):
    """One entry for each executed env step: as many as the chunk has, or fewer if the episode ended
    before."""

    rewards: list[float]
    terminated: list[bool]
    """The task has ended."""
    truncated: list[bool]
    """The time limit was reached."""
    success: list[bool]
    observation: Observation
    """After the last step."""


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
