"""SRPO's rewards against loops over pairs of points, and by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.acting.srpo import SrpoSettings, cluster_centres, srpo_rewards
from tests.references import srpo

POINTS = st.lists(
    st.tuples(st.sampled_from((0.0, 2.0, 2.1, 4.0)), st.sampled_from((0.0, 0.1, 0.5, 3.0))),
    max_size=12,
)


@settings(max_examples=100)
@given(
    won=POINTS,
    lost=POINTS,
    eps=st.sampled_from((0.3, 0.5, 1.0)),
    min_samples=st.integers(1, 4),
)
def test_rewards_of_two_tasks(won, lost, eps, min_samples):
    """The second task has all failures, and no success."""
    embeddings = [*won, *lost, *lost]
    tasks = ["a"] * (len(won) + len(lost)) + ["b"] * len(lost)
    successes = [True] * len(won) + [False] * (2 * len(lost))
    settings_used = SrpoSettings(eps, min_samples, 0.7, 8.0, 2.0)
    found = srpo_rewards(tasks, successes, embeddings, settings_used)
    rewards, places, number = srpo.rewards(won, lost, eps, min_samples, 0.7, 8.0)
    wanted = [2.0] * len(won) + [2.0 * reward for reward in rewards] + [0.0] * len(lost)
    distances = [-1.0] * len(won) + places + [-1.0] * len(lost)
    assert [each.reward for each in found] == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert [each.distance for each in found] == pytest.approx(distances, rel=1e-9, abs=1e-12)

    for each, task in zip(found, tasks, strict=True):
        is_alone = task == "b" or not won
        assert each.clusters == (0 if is_alone else number)
        assert each.fallback == (not is_alone and number == 0)


def test_a_point_at_the_border_belongs_to_its_cluster():
    """Of 0, 0, 0, 1 and 2 the last has one neighbour beside itself, which is a core point; 9 is
    noise."""
    vectors = np.array([[0.0], [0.0], [0.0], [1.0], [2.0], [9.0]])
    centres, is_fallback = cluster_centres(vectors, SrpoSettings(eps=0.5, min_samples=4))
    assert centres.tolist() == [[pytest.approx(0.6)]] and not is_fallback
