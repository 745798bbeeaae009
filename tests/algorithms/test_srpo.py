"""SRPO's rewards against loops over pairs of points in float64, and by hand."""

import math
from random import Random

import numpy as np
import pytest

from distflow.algorithms.srpo import SrpoSettings, cluster_centres, dbscan, srpo_rewards

SETTINGS = SrpoSettings()


def components(points: list[list[float]], eps: float, min_samples: int) -> set[frozenset[int]]:
    """Sets of core points that a chain of neighbours joins, by repeated merging."""
    near = {
        i: {j for j, q in enumerate(points) if math.dist(p, q) <= eps} for i, p in enumerate(points)
    }
    cores = {i for i, own in near.items() if len(own) >= min_samples}
    sets = [{i} for i in cores]
    merged = True
    while merged:
        merged = False
        for one in sets:
            for other in sets:
                if one is not other and any(near[i] & other for i in one):
                    one |= other
                    sets.remove(other)
                    merged = True
                    break
            if merged:
                break
    return {frozenset(each) for each in sets}


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("min_samples", [1, 2, 4])
def test_clusters_are_the_chains_of_core_points(seed: int, min_samples: int) -> None:
    draws = Random(seed)
    points = [
        [draws.choice((0.0, 2.0)) + draws.gauss(0, 0.4), draws.gauss(0, 0.4)] for _ in range(25)
    ]
    labels = dbscan(np.array(points), 0.4, min_samples).tolist()
    near = [[j for j, q in enumerate(points) if math.dist(p, q) <= 0.4] for p in points]
    cores = {i for i, own in enumerate(near) if len(own) >= min_samples}
    found = {
        label: frozenset(i for i in cores if labels[i] == label)
        for label in {labels[i] for i in cores}
    }
    assert set(found.values()) == components(points, 0.4, min_samples)
    for point in set(range(25)) - cores:
        names = {labels[j] for j in near[point] if j in cores}
        assert labels[point] == (min(names) if names else -1), (
            "the first cluster that it borders, or noise"
        )


def test_rewards_by_hand() -> None:
    won = [[0.0, 0.0], [0.0, 0.0], [4.0, 0.0], [4.0, 0.0]]
    lost = [[0.0, 1.0], [4.0, 2.0], [0.0, 5.0]]  # 1, 2 and 5 from the nearest centre: 0, 0.25 and 1
    found = srpo_rewards(["t"] * 7, [True] * 4 + [False] * 3, [*won, *lost], SETTINGS)
    assert [each.reward for each in found[:4]] == [1.0] * 4
    assert [each.distance for each in found[4:]] == [0.0, 0.25, 1.0]
    assert {(each.clusters, each.fallback) for each in found} == {(2, False)}
    for each in found[4:]:
        assert each.reward == pytest.approx(
            0.6 / (1 + math.exp(-10 * (0.5 - each.distance))), rel=1e-12
        )


def test_each_task_has_its_own_successes_and_failures_without_one_get_nothing() -> None:
    tasks = ["a", "b", "a", "b", "c"]
    won = [True, False, False, False, True]
    found = srpo_rewards(
        tasks, won, [[0.0], [1.0], [2.0], [3.0], [4.0]], SrpoSettings(reward_coef=5.0)
    )
    assert [each.reward for each in found] == [5.0, 0.0, pytest.approx(5 * 0.3), 0.0, 5.0]
    assert srpo_rewards([], [], [], SETTINGS) == []


def test_successes_with_the_same_embedding_are_one_cluster() -> None:
    centres, is_fallback = cluster_centres(np.ones((5, 3)), SETTINGS)
    assert centres.tolist() == [[1.0, 1.0, 1.0]] and not is_fallback


def test_far_apart_successes_have_their_mean_instead_of_a_cluster() -> None:
    vectors = np.random.default_rng(0).normal(size=(16, 48))
    centres, is_fallback = cluster_centres(vectors, SETTINGS)
    assert is_fallback and np.allclose(centres[0], vectors.mean(axis=0))
    one = srpo_rewards(["t", "t"], [True, False], [[1.0, 2.0], [3.0, 4.0]], SETTINGS)
    assert one[0].fallback and one[1].reward == pytest.approx(0.3)


def test_the_scale_of_a_dimension_does_not_matter_to_clusters() -> None:
    draws = np.random.default_rng(1)
    vectors = np.concatenate([draws.normal(0, 0.05, (6, 2)), draws.normal(3, 0.05, (6, 2))])
    plain, scaled = (
        cluster_centres(vectors * factor, SETTINGS)[0] for factor in (1.0, np.array([1.0, 1000.0]))
    )
    assert len(plain) == 2 and np.allclose(plain * [1.0, 1000.0], scaled)
