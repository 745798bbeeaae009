"""Numbers of an action as tokens, one for each dimension: `action_tokens` divides it into equal
bins; those of a continuous head have a value beside each token."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distflow.config import Config
from distflow.errors import UserError
from distflow.untrusted_files import check_file


@dataclass(frozen=True)
class ActionTokens:
    """Chunks of actions as token ids, step by step, each dimension in turn."""

    low: tuple[float, ...]
    """The lower bound of each dimension."""
    high: tuple[float, ...]
    bins: int
    """How many a dimension has; the number of a bin is its middle."""
    first: int
    """Token id of bin 0, which those of the other bins follow."""
    chunk: int
    """Steps of a chunk."""
    clips: bool = False
    """Numbers beyond the bounds count as the nearest bin, as statistics of quantiles want it."""

    def __post_init__(self) -> None:
        """Raises UserError for bounds whose bins cannot be told apart."""
        bins = np.arange(self.bins)[:, None].repeat(self.dim, axis=1)
        middles = self._middles(bins)

        are_apart = self.bins >= 2 and np.isfinite(middles).all()
        if not (are_apart and (self.bins_of(middles) == bins).all()):
            raise UserError(
                f"actions: {self.bins} bins between {self.low} and {self.high} cannot be told apart"
            )

    @property
    def dim(self) -> int:
        return len(self.low)

    @property
    def num_tokens(self) -> int:
        """Of a chunk."""
        return self.dim * self.chunk

    def bins_of(self, actions: NDArray[np.float64]) -> NDArray[np.int64]:
        """The bins of actions `(steps, dim)`. Raises ValueError for a number that is not finite, or
        out of bounds."""
        actions = np.asarray(actions, np.float64)
        low = np.array(self.low)
        high = np.array(self.high)
        wrong = ~np.isfinite(actions)
        if not self.clips:
            wrong |= (actions < low) | (actions > high)

        if wrong.any():
            step, part = np.argwhere(wrong)[0]
            raise ValueError(
                f"dimension {part} of action {step} is {actions[step, part]:g}, not a number from "
                f"{low[part]:g} to {high[part]:g}"
            )

        bins = np.floor((actions - low) / (high - low) * self.bins)
        return np.clip(bins, 0, self.bins - 1).astype(np.int64)

    def encode(self, actions: NDArray[np.float64]) -> list[int]:
        """The tokens of actions `(steps, dim)`; raises as `bins_of`."""
        return [int(each) for each in self.first + self.bins_of(actions).reshape(-1)]

    def decode(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """The actions `(steps, dim)` of a response, up to the first token that is none, or a step
        that is cut."""
        bins = np.array(token_ids, np.int64) - self.first
        wrong = np.flatnonzero((bins < 0) | (bins >= self.bins))
        steps = int(wrong[0] if len(wrong) else len(bins)) // self.dim
        return self._middles(bins[: steps * self.dim].reshape(steps, self.dim))

    def _middles(self, bins: NDArray[np.int64]) -> NDArray[np.float64]:
        low = np.array(self.low)
        high = np.array(self.high)
        return low + (bins + 0.5) * ((high - low) / self.bins)


@dataclass(frozen=True)
class ContinuousActions:
    """Chunks of actions as values, step by step, each dimension in turn: −1 is its lower bound, and
    1 its upper one."""

    low: tuple[float, ...]
    """The lower bound of each dimension."""
    high: tuple[float, ...]
    first: int
    """See `ActionHead`, as for `steps`, `bins` and `noise`."""
    chunk: int
    """Steps of a chunk."""
    steps: int = 0
    """Denoising steps, of which the last one gives the action; 0 for none."""
    bins: int = 2
    noise: float = 0.0

    @property
    def dim(self) -> int:
        return len(self.low)

    @property
    def num_tokens(self) -> int:
        """Of a chunk."""
        return self.dim * (1 + self.steps) * self.chunk

    @property
    def head(self) -> dict[str, Any]:
        """The name and the fields of the `ActionHead`."""
        fields = ("first", "dim", "steps", "bins", "noise")
        return {"name": "actions", **{name: getattr(self, name) for name in fields}}

    def decode(self, values: Sequence[float]) -> NDArray[np.float64]:
        """The actions `(steps, dim)`, clipped to the bounds. Raises ValueError for a value that is
        not finite."""
        size = self.dim * (1 + self.steps)
        low = np.array(self.low)
        high = np.array(self.high)
        whole = len(values) // size * size

        given = np.array(values[:whole], np.float64).reshape(-1, size)[:, -self.dim :]
        if not np.isfinite(given).all():
            step, part = np.argwhere(~np.isfinite(given))[0]
            raise ValueError(
                f"dimension {part} of action {step} is {given[step, part]:g}: the policy has "
                "diverged"
            )

        return low + (np.clip(given, -1, 1) + 1) / 2 * (high - low)


def denoising_steps(options: Mapping[str, Any]) -> int:
    """Of each number of an action; 0 for heads that draw it at once."""
    if options.get("head") == "flow_sde":
        return int(options.get("denoising_steps", 4))
    return 0


def draws_numbers(options: Mapping[str, Any]) -> bool:
    """Whether a head draws the numbers of actions. options: of the workflow."""
    actions = options.get("actions")
    head = actions.get("head") if isinstance(actions, Mapping) else None
    return head not in (None, "action_tokens")


def tokens_of_action(config: Config) -> int:
    """By the options of the workflow. Raises UserError."""
    options: Any = config.actor_rollout_ref.rollout.workflow_kwargs["actions"]
    return len(action_bounds(options)[0]) * (1 + denoising_steps(options))


def action_bounds(options: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """Lower and upper bounds, and whether they are quantiles: from `low` and `high`, or from the
    file `statistics` with `unnorm_key`, as OpenVLA's `dataset_statistics.json` has them. Raises
    UserError."""
    dim = options.get("action_dim")
    is_quantiles = "statistics" in options
    if is_quantiles:
        low, high = _quantiles(Path(str(options["statistics"])), options.get("unnorm_key"))
    elif options.get("low") is None or options.get("high") is None:
        raise UserError("actions: set low and high, or statistics and unnorm_key")
    else:
        low = _numbers(options["low"], dim)
        high = _numbers(options["high"], dim)

    has_sizes = len(low) == len(high) == (dim or len(low))
    if not has_sizes or any(one >= other for one, other in zip(low, high, strict=True)):
        raise UserError(
            f"actions: {len(low)} lower and {len(high)} upper bounds for action_dim={dim}, each "
            "low < high"
        )

    return tuple(map(float, low)), tuple(map(float, high)), is_quantiles


def _numbers(given: Any, dim: int | None) -> list[float]:
    """One bound for each dimension; a single number is that of all."""
    if isinstance(given, int | float):
        return [given] * (dim or 1)
    return list(given)


def _quantiles(path: Path, key: object) -> tuple[list[float], list[float]]:
    try:
        found = json.loads(check_file(path).read_text("utf-8"))
        if key is not None or len(found) != 1:
            own = found[key]
        else:
            own = next(iter(found.values()))
        return list(own["action"]["q01"]), list(own["action"]["q99"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"actions.statistics={path}, unnorm_key={key}"
        raise UserError(
            f"{what}: no q01 and q99 of actions ({type(error).__name__}: {error})"
        ) from None
