"""Nodes of SRPO: the filter of groups by their successes, embeddings of episodes, and rewards."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.acting.srpo import SrpoReward, SrpoSettings, srpo_rewards
from distflow.algorithms.advantages.group_estimator_base import on_last_token
from distflow.algorithms.group_filter import Band
from distflow.config import Config
from distflow.errors import UserError
from distflow.graph import Drop, NodeOutput, NodeRole, node, node_factory
from distflow.graph.fields import register_field
from distflow.import_target import LoadError, load_function
from distflow.training.engine import Collective
from distflow.untrusted_files import load_image

PIXELS = "pixels"
_SIDE = 8
TOO_EASY = "success_above_bound"
TOO_HARD = "success_below_bound"
TRUNCATED = "truncated"


class _Scored(NamedTuple):
    """An episode with a vector. They are sorted by their ids."""

    uid: str
    task: str
    success: bool
    embedding: list[float]


register_field("embeddings", "object", "object", "an episode's vector, for SRPO; empty without one")
register_field(
    "srpo_distance",
    "float64",
    "sample",
    "of a failure to the successes of its task, from 0 to 1; else -1",
)


@node_factory
@node(role=NodeRole.DYNAMIC_SAMPLING, writes=())
def embodied_sampling(config: Config) -> Callable[..., object]:
    """The filter of groups by `embodied_sampling`."""
    own = config.embodied_sampling
    bounds = (0.0, 1.0)
    if own.filter_accuracy:
        bounds = (own.accuracy_lower_bound, own.accuracy_upper_bound)
    return partial(keep_group, bounds=bounds, filter_truncated=own.filter_truncated)


def keep_group(
    success: Tensor, truncated: Tensor, valid: Tensor, *, bounds: Band, filter_truncated: bool
) -> Drop | None:
    """A group whose share of successes is out of bounds, or that has a truncated episode, is
    replaced. Episodes with a reward error do not count."""
    valid = valid.bool()
    share = 0.0
    if bool(valid.any()):
        share = float(success[valid].double().mean())

    if share < bounds[0]:
        return Drop(TOO_HARD)
    if share > bounds[1]:
        return Drop(TOO_EASY)
    if filter_truncated and bool(truncated[valid].any()):
        return Drop(TRUNCATED)

    return None


def pixels(frames: NDArray[np.uint8]) -> list[float]:
    """The last frame `(H, W, 3)`, averaged to at most 8 x 8 cells, from 0 to 1."""
    last = frames[-1].astype(np.float64) / 255
    rows, columns = (np.array_split(np.arange(size), min(size, _SIDE)) for size in last.shape[:2])

    found: list[float] = []
    for row in rows:
        for column in columns:
            for each in last[np.ix_(row, column)].mean(axis=(0, 1)):
                found.append(float(each))

    return found


@node_factory
@node(role=NodeRole.REWARD, writes=("embeddings", "valid", "reward_errors"), scope="group")
def embed(config: Config) -> Callable[..., object]:
    """The node for `srpo.embedder`. Raises UserError for an unusable one."""
    if (target := config.srpo.embedder) == PIXELS:
        return partial(embed_episodes, embedder=pixels)
    try:
        return partial(embed_episodes, embedder=load_function(target))
    except LoadError as error:
        raise UserError(f"srpo.embedder: {error}") from error


async def embed_episodes(
    reward_extra: list[Mapping[str, Any]],
    valid: Tensor,
    reward_errors: list[str | None],
    *,
    embedder: Callable[[NDArray[np.uint8]], object],
) -> NodeOutput:
    """A vector of each episode's frames. An episode without a finite one has a reward error."""
    started = time.perf_counter()
    vectors = list[list[float]]()
    errors = list(reward_errors)
    for place, extra in enumerate(reward_extra):
        vector: list[float] = []
        if valid[place]:
            frames = extra.get("frames", ())
            vector, error = await asyncio.to_thread(_embedding_of, frames, embedder)
            errors[place] = error or errors[place]
        vectors.append(vector)

    dimensions = {len(vector) for vector in vectors if vector}
    if len(dimensions) > 1:
        raise UserError(
            f"srpo.embedder returned vectors of {sorted(dimensions)} numbers: return as many for "
            "all"
        )

    is_left = [bool(vector) for vector in vectors]
    columns = {"embeddings": vectors, "valid": torch.tensor(is_left), "reward_errors": errors}
    return NodeOutput(columns, {"acting/embedding_ms": 1000 * (time.perf_counter() - started)})


def _embedding_of(
    paths: Sequence[str], embedder: Callable[[NDArray[np.uint8]], object]
) -> tuple[list[float], str]:
    """The vector, or an empty one and why there is none."""
    if not paths:
        return [], "srpo.embedder: the episode has no frames: the simulator shows no images"

    try:
        found = embedder(np.stack([np.asarray(load_image(path)) for path in paths]))
        vector = [float(each) for each in np.asarray(found, np.float64).reshape(-1)]
    except Exception as error:  # the embedder's code may raise anything
        return [], f"srpo.embedder: {type(error).__name__}: {error}"[:500]

    if not vector or not all(map(math.isfinite, vector)):
        return (
            [],
            "srpo.embedder returned a vector that is empty, or has a number that is not finite",
        )

    return vector, ""


@node_factory
@node(role=NodeRole.REWARD, writes=("token_level_rewards", "srpo_distance", "reward_parts"))
def srpo_reward(config: Config) -> Callable[..., object]:
    return partial(shape_rewards, settings=srpo_settings(config))


def srpo_settings(config: Config) -> SrpoSettings:
    own = config.srpo
    return SrpoSettings(own.eps, own.min_samples, own.max, own.steepness, own.reward_coef)


def shape_rewards(
    uid: list[str],
    embeddings: list[list[float]],
    success: Tensor,
    valid: Tensor,
    domain: list[str],
    reward_extra: list[Mapping[str, Any]],
    reward_parts: list[Mapping[str, float]],
    response_mask: Tensor,
    reduce: Collective,
    *,
    settings: SrpoSettings,
) -> NodeOutput:
    """SRPO's rewards, by the episodes of all ranks in the order of their ids: the same for any
    number of ranks."""
    own = list[_Scored]()
    for row, name in enumerate(uid):
        if valid[row]:
            task = task_of(domain[row], reward_extra[row])
            own.append(_Scored(name, task, bool(success[row]), embeddings[row]))

    everyone = list[_Scored]()
    for part in reduce.gather(own):
        everyone += part
    everyone.sort()
    tasks = [each.task for each in everyone]
    shaped = srpo_rewards(
        tasks,
        [each.success for each in everyone],
        [each.embedding for each in everyone],
        settings,
    )
    by_name = {}
    for episode, reward in zip(everyone, shaped, strict=True):
        by_name[episode.uid] = reward
    found = [by_name.get(name, SrpoReward(0.0, -1.0, 0, False)) for name in uid]
    parts = []
    for told, each in zip(reward_parts, found, strict=True):
        parts.append({**told, "srpo_distance": each.distance})
    distances = torch.tensor([each.distance for each in found], dtype=torch.float64)
    rewards = torch.tensor([each.reward for each in found], dtype=torch.float64)
    written = {
        "token_level_rewards": on_last_token(rewards, response_mask),
        "srpo_distance": distances,
        "reward_parts": parts,
    }

    return NodeOutput(written, _metrics(tasks, shaped))


def task_of(domain: str, extra: Mapping[str, Any]) -> str:
    """Episodes of one domain with one instruction have the same task."""
    return f"{domain}: {extra.get('instruction', '')}"


def _metrics(tasks: Sequence[str], shaped: Sequence[SrpoReward]) -> dict[str, float]:
    lost = [each.reward for each in shaped if each.distance >= 0]
    by_task = dict(zip(tasks, shaped, strict=True)).values()
    num_tasks = max(len(by_task), 1)
    return {
        "srpo/reward_of_failures": sum(lost) / max(len(lost), 1),
        "srpo/clusters": sum(each.clusters for each in by_task) / num_tasks,
        "srpo/fallback_frac": sum(each.fallback for each in by_task) / num_tasks,
    }
