"""Learning-rate factors against figures worked by hand, and against `transformers`' own
schedulers."""

import math

import pytest
import torch
import transformers

from distflow.errors import UserError
from distflow.training.optimizer import make_schedule


def test_constant_is_one_from_the_first_step() -> None:
    schedule = make_schedule("constant", total_steps=10, warmup_ratio=0.5)
    assert [schedule(step) for step in (0, 3, 10, 99)] == [1.0] * 4


def test_warm_up_rises_linearly_from_zero() -> None:
    schedule = make_schedule("constant_with_warmup", total_steps=100, warmup_steps=4)
    assert [schedule(step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_to_the_least_and_stays() -> None:
    schedule = make_schedule("linear_with_warmup", total_steps=12, warmup_steps=2, min_lr_ratio=0.2)
    assert [schedule(step) for step in (0, 1, 2, 7, 12, 50)] == pytest.approx(
        [0, 0.5, 1.0, 0.6, 0.2, 0.2]
    )


def test_cosine_falls_by_half_a_wave() -> None:
    schedule = make_schedule(
        "cosine_with_warmup", total_steps=10, warmup_ratio=0.2, min_lr_ratio=0.1
    )
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))
    assert [schedule(step) for step in (0, 1, 2, 4, 6, 10, 11)] == pytest.approx(
        [0, 0.5, 1, quarter, 0.55, 0.1, 0.1]
    )


def test_warmup_steps_override_the_ratio_and_the_ratio_rounds_down() -> None:
    by_steps = make_schedule(
        "constant_with_warmup", total_steps=100, warmup_ratio=0.5, warmup_steps=0
    )
    by_ratio = make_schedule("constant_with_warmup", total_steps=19, warmup_ratio=0.1)
    assert by_steps(0) == 1.0
    assert [by_ratio(step) for step in (0, 1)] == [0.0, 1.0]


def test_runs_shorter_than_their_warm_up_stay_finite() -> None:
    schedule = make_schedule("cosine_with_warmup", total_steps=1, warmup_steps=3)
    assert [schedule(step) for step in (0, 1, 2, 3, 4)] == pytest.approx(
        [0, 1 / 3, 2 / 3, 1.0, 0.0]
    )


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear_with_warmup", "get_linear_schedule_with_warmup"),
        ("cosine_with_warmup", "get_cosine_schedule_with_warmup"),
    ],
)
def test_the_numbers_are_those_of_transformers(name: str, theirs: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    factor = getattr(transformers, theirs)(optimizer, 3, 20).lr_lambdas[0]
    schedule = make_schedule(name, total_steps=20, warmup_steps=3)
    assert [schedule(step) for step in range(21)] == pytest.approx(
        [factor(step) for step in range(21)]
    )


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="constant_with_warmup"):
        make_schedule("cosine", total_steps=1)
