"""What the selftest compares: by hand, and against the ways in which two runs can differ."""

import math
from dataclasses import replace

import pytest
import torch

from distflow.selftest.figures import Differences, Figures, Step, Unlike, differences

STEP = Step([[5, 6], [7]], [[-0.5, -4.0], [-1.0]], [[-0.5, -4.0], [-1.0]], [0.5, 0.0], {"actor/loss": 0.25})
FIGURES = Figures(
    [STEP, replace(STEP, updates={"actor/loss": 0.5, "actor/grad_norm": 2.0})], {"actor.w": torch.ones(2)}
)


def with_step(**changes: object) -> Figures:
    first, second = FIGURES.steps
    return replace(FIGURES, steps=[first, replace(second, **changes)])  # type: ignore[arg-type]


def test_a_run_is_equal_to_itself() -> None:
    assert differences(FIGURES, FIGURES) == Differences(0.0, 0.0, 0.0, 0.0)
    assert differences(FIGURES, FIGURES).within(0.0)


def test_differences_are_the_largest_of_each_kind_beyond_1_as_a_share() -> None:
    other = with_step(
        updates={"actor/loss": 0.25, "actor/grad_norm": 3.0},
        sampled=[[-0.5, -5.0], [-1.0]],
        log_probs=[[-0.75, -4.0], [-1.0]],
    )
    other = replace(other, weights={"actor.w": torch.tensor([1.0, 1.125])})
    assert differences(FIGURES, other) == Differences(loss=0.25, grad_norm=0.5, log_prob=0.25, weight=0.125)
    assert differences(FIGURES, other).within(0.5) and not differences(FIGURES, other).within(0.4)


@pytest.mark.parametrize("kind", ["loss", "grad_norm", "log_prob", "weight"])
def test_no_number_is_within_no_limit(kind: str) -> None:
    found = Differences(**{**dict.fromkeys(("loss", "grad_norm", "log_prob", "weight"), 0.0), kind: math.nan})
    assert not found.within(math.inf)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (with_step(updates={"actor/loss": math.nan, "actor/grad_norm": 2.0}), "loss"),
        (with_step(log_probs=[[-0.5, math.nan], [-1.0]]), "log_prob"),
        (replace(FIGURES, weights={"actor.w": torch.tensor([math.nan, 1.0])}), "weight"),
    ],
)
def test_a_figure_that_is_no_number_is_found(other: Figures, kind: str) -> None:
    for pair in ((FIGURES, other), (other, FIGURES)):
        assert math.isnan(getattr(differences(*pair), kind))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(FIGURES, steps=FIGURES.steps[:1]), "2 steps and 1"),
        (with_step(answers=[[5, 8], [7]]), "other responses in step 2"),
        (with_step(scores=[0.5, 0.25]), "other scores in step 2"),
        (with_step(updates={"actor/loss": 0.5}), "other losses in step 2"),
        (replace(FIGURES, weights={"critic.w": torch.ones(2)}), "other weights"),
    ],
)
def test_what_has_no_distance_is_named(other: Figures, what: str) -> None:
    with pytest.raises(Unlike, match=what):
        differences(FIGURES, other)
