"""What a curriculum is told of a domain, and the weights of `learnability`."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.scheduling.curriculum import Accuracy, Curriculum, CurriculumPlan
from tests.references import curriculum as reference

GROUPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda g: g[0] <= g[1]))
WEIGHTS = {"maths": 3.0, "code": 1.0}


@settings(max_examples=40)
@given(
    steps=st.lists(st.tuples(GROUPS, GROUPS), min_size=1, max_size=4),
    smoothing=st.sampled_from((0.9, 0.5, 0.0)),
)
def test_learnability(
    steps: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]], smoothing: float
) -> None:
    found = Curriculum(CurriculumPlan("learnability", smoothing=smoothing), WEIGHTS)
    shares = [Fraction(1, 2)] * 2
    values: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    accuracies: dict[str, list[float]] = {name: [] for name in WEIGHTS}
    for number, step in enumerate(steps):
        for name, groups in zip(WEIGHTS, step, strict=True):
            for group in groups:
                found.count(name, Accuracy(*group))
            scored = [group for group in groups if group[1]]
            if scored:
                values[name].append(reference.learnability(scored))
                rights = sum(right for right, _ in scored)
                accuracies[name].append(rights / sum(count for _, count in scored))
        shares, progress = found.shares(number + 1, shares)
        worths = []
        for name, weight in WEIGHTS.items():
            own = values[name]
            mean = reference.moving_mean(own, smoothing) if own else None
            worths.append(reference.worth(weight, mean))
            assert progress[name].mean_learnability == (mean and pytest.approx(mean))
            if accuracies[name]:
                wanted = reference.moving_mean(accuracies[name], smoothing)
                assert progress[name].mean_accuracy == pytest.approx(wanted)
        for share, worth in zip(shares, worths, strict=True):
            assert float(share) == pytest.approx(worth / sum(worths), abs=1e-6)
