"""Running moments against the statistics of all values so far, by another implementation."""

import json
import statistics
from dataclasses import asdict

import pytest
import torch

from distflow.algorithms.normalization_filters_and_weights import Moments, Normalization

STEPS = [[0.0, 1.0, 1.0], [0.5], [], [3.0, -2.0, 0.25, 0.25]]


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_moments_are_those_of_all_values_so_far(offset: float) -> None:
    moments = Moments()
    seen = list[float]()
    for step in STEPS:
        values = torch.tensor(
            [[value + offset for value in step] + [torch.nan]], dtype=torch.float64
        )
        mask = torch.tensor([[1.0] * len(step) + [0.0]])
        seen += [value + offset for value in step]
        moments = Moments(**json.loads(json.dumps(asdict(moments)))).with_values(values, mask)
        assert moments.count == len(seen)
        assert moments.mean == pytest.approx(statistics.fmean(seen), rel=1e-12)
        if len(seen) > 1:
            assert moments.std() == pytest.approx(statistics.stdev(seen), rel=1e-7)
            assert moments.std(unbiased=False) == pytest.approx(statistics.pstdev(seen), rel=1e-7)


def test_too_few_values_have_no_deviation() -> None:
    one = Moments().with_values(torch.tensor([[4.0]]), torch.ones(1, 1))
    assert (Moments().std(), one.mean, one.std(), one.std(unbiased=False)) == (1.0, 4.0, 1.0, 0.0)


@pytest.mark.parametrize("mean_level", ["running", "batch", None])
@pytest.mark.parametrize("std_level", ["running", None])
def test_rewards_are_normalised_by_the_moments_of_the_run(
    mean_level: str | None, std_level: str | None
) -> None:
    """(x − mean) / (std + ε), by hand; the invalid sample is in neither."""
    before = [2.0, 4.0, 9.0]
    step = [1.0, 5.0, 100.0]
    valid = torch.tensor([True, True, False])
    moments = Moments().with_values(torch.tensor([before]), torch.ones(1, 3))
    values = torch.tensor(step)[:, None]
    moments = moments.with_values(values, valid[:, None])
    norm = Normalization(mean_level, std_level=std_level, eps=0.1)  # type: ignore[arg-type]
    found = norm(values, torch.ones(3, 1), torch.tensor([0, 0, 1]), valid, moments=moments)
    mean = {"running": statistics.fmean([*before, 1.0, 5.0]), "batch": 3.0, None: 0.0}[mean_level]
    scale = statistics.stdev([*before, 1.0, 5.0]) + 0.1 if std_level else 1.0
    assert found[:, 0].tolist() == pytest.approx(
        [(1.0 - mean) / scale, (5.0 - mean) / scale, 0.0], rel=1e-12
    )
