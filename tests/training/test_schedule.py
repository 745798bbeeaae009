"""Learning-rate factors against figures worked by hand, and against `transformers`' own
schedulers."""

import pytest
import torch
import transformers

from distflow.training.optimizer import make_schedule


def test_warmup_steps_override_the_ratio_and_the_ratio_rounds_down():
    by_steps = make_schedule(
        "constant_with_warmup", total_steps=100, warmup_ratio=0.5, warmup_steps=0
    )
    by_ratio = make_schedule("constant_with_warmup", total_steps=19, warmup_ratio=0.1)
    assert by_steps(0) == 1.0
    assert [by_ratio(step) for step in (0, 1)] == [0.0, 1.0]


def test_runs_shorter_than_their_warm_up_stay_finite():
    schedule = make_schedule("cosine_with_warmup", total_steps=1, warmup_steps=3)
    assert [schedule(step) for step in (0, 1, 2, 3, 4)] == pytest.approx(
        [0, 1 / 3, 2 / 3, 1.0, 0.0]
    )


@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear_with_warmup", "get_linear_schedule_with_warmup"),
        ("cosine_with_warmup", "get_cosine_schedule_with_warmup"),
    ],
)
def test_the_numbers_are_those_of_transformers(name, theirs, least):
    """Between the least factor and 1; behind the last step the factor stays."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    factor = getattr(transformers, theirs)(optimizer, 3, 20).lr_lambdas[0]
    schedule = make_schedule(name, total_steps=20, warmup_steps=3, min_lr_ratio=least)
    wanted = [factor(step) for step in range(3)]
    wanted += [least + (1.0 - least) * factor(step) for step in range(3, 21)]
    assert [schedule(step) for step in range(22)] == pytest.approx([*wanted, least])
