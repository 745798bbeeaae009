"""SRPO: rewards of failures by their distance to the successes of the same task, in a space of
embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]


@dataclass(frozen=True)
class SrpoSettings:
    eps: float = 0.5
    """Of DBSCAN over the successes, each dimension scaled to variance 1."""
    min_samples: int = 2
    """Of DBSCAN."""
    max: float = 0.6
    """The largest reward of a failure."""
    steepness: float = 10.0
    """Of the sigmoid."""
    reward_coef: float = 1.0
    """On all rewards."""


@dataclass(frozen=True)
class SrpoReward:
    """Of an episode."""

    reward: float
    distance: float
    """To the nearest centre, from 0 to 1 over the task's failures; -1 for a success, and without a
    success."""
    clusters: int
    """Of the task's successes."""
    fallback: bool
    """No cluster was found, so that their mean stands for all."""


def srpo_rewards(
    tasks: Sequence[str],
    successes: Sequence[bool],
    embeddings: Sequence[Sequence[float]],
    settings: SrpoSettings,
) -> list[SrpoReward]:
    """The reward of each episode: 1 for a success, `max · sigmoid(steepness · (0.5 - distance))`
    for a failure, and 0 for failures of a task without a success. All times `reward_coef`."""
    found = [SrpoReward(0.0, -1.0, 0, False)] * len(tasks)
    for task in dict.fromkeys(tasks):
        own = [place for place, name in enumerate(tasks) if name == task]
        won = [place for place in own if successes[place]]
        lost = [place for place in own if not successes[place]]
        if not won:
            continue

        centres, is_fallback = cluster_centres(
            np.array([embeddings[place] for place in won], np.float64), settings
        )
        number = 0 if is_fallback else len(centres)
        for place in won:
            found[place] = SrpoReward(settings.reward_coef, -1.0, number, is_fallback)

        distances = _distances([embeddings[place] for place in lost], centres)
        for place, distance in zip(lost, distances, strict=True):
            shaped = settings.max / (1.0 + float(np.exp(settings.steepness * (distance - 0.5))))
            found[place] = SrpoReward(settings.reward_coef * shaped, distance, number, is_fallback)

    return found


def cluster_centres(vectors: Vectors, settings: SrpoSettings) -> tuple[Vectors, bool]:
    """The mean of each cluster of successes `(n, dim)`, or of all if there is no cluster, and
    whether that is so."""
    deviation = vectors.std(axis=0)
    deviation[deviation < 10 * np.finfo(np.float64).eps] = 1.0
    scaled = (vectors - vectors.mean(axis=0)) / deviation
    labels = dbscan(scaled, settings.eps, settings.min_samples)
    if not len(labels) or labels.max() < 0:
        return vectors.mean(axis=0, keepdims=True), True

    centres = []
    for label in range(int(labels.max()) + 1):
        centres.append(vectors[labels == label].mean(axis=0))
    return np.stack(centres), False


def dbscan(vectors: Vectors, eps: float, min_samples: int) -> NDArray[np.int64]:
    """The cluster of each point, from 0; -1 for noise. A point within `eps` of a core point of
    several clusters belongs to the first one; a point counts among its own neighbours."""
    near = np.stack([np.linalg.norm(vectors - each, axis=1) <= eps for each in vectors])
    is_core = near.sum(axis=1) >= min_samples

    labels = np.full(len(vectors), -1, np.int64)
    label = 0
    for start in range(len(vectors)):
        if not is_core[start] or labels[start] >= 0:
            continue

        waiting = [start]
        while waiting:
            point = waiting.pop()
            if labels[point] >= 0:
                continue
            labels[point] = label
            if is_core[point]:
                waiting += np.flatnonzero(near[point] & (labels < 0)).tolist()

        label += 1

    return labels


def _distances(failures: Sequence[Sequence[float]], centres: Vectors) -> list[float]:
    """To the nearest centre, from 0 for the nearest failure to 1 for the farthest one; 0.5 if all
    are equally far."""
    if not failures:
        return []

    nearest = [
        float(np.linalg.norm(centres - np.array(each, np.float64), axis=1).min())
        for each in failures
    ]
    low = min(nearest)
    high = max(nearest)

    return [0.5 if high - low < 1e-6 else (each - low) / (high - low) for each in nearest]
