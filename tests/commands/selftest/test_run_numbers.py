"""What the selftest compares: by hand, and against the ways in which two runs can differ. The
figures that ship are those of the plain reference loop, today."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distflow.commands.selftest.compared_runs import TOLERANCE
from distflow.commands.selftest.runs import (
    PRESET_KEYS,
    RECORDED,
    Differences,
    Figures,
    Lab,
    Recorded,
    Step,
    Unlike,
    differences,
    read_recorded,
)
from tests.commands.selftest.record import reference, write_recorded

STEP = Step(
    [[5, 6], [7]], [[-0.5, -4.0], [-1.0]], [[-0.5, -4.0], [-1.0]], [0.5, 0.0], {"actor/loss": 0.25}
)
FIGURES = Figures(
    [STEP, replace(STEP, updates={"actor/loss": 0.5, "actor/grad_norm": 2.0})],
    {"actor.w": torch.ones(2)},
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
    assert differences(FIGURES, other) == Differences(
        loss=0.25, grad_norm=0.5, log_prob=0.25, weight=0.125
    )
    assert differences(FIGURES, other).within(0.5) and not differences(FIGURES, other).within(0.4)


@pytest.mark.parametrize("kind", ["loss", "grad_norm", "log_prob", "weight"])
def test_no_number_is_within_no_limit(kind: str) -> None:
    found = Differences(
        **{**dict.fromkeys(("loss", "grad_norm", "log_prob", "weight"), 0.0), kind: math.nan}
    )
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


TRAINED = [("grpo", "actor"), ("ppo", "actor"), ("ppo", "critic")]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Recorded]:
    return read_recorded(RECORDED)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in PRESET_KEYS]
)
def replayed(
    request: pytest.FixtureRequest,
    recorded: dict[str, Recorded],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Lab, Recorded, Figures]:
    """The recorded answers in a run of ours: where it was made, what is recorded of it, what it
    found."""
    own = recorded[request.param]
    lab = Lab.of(tmp_path_factory.mktemp("replayed") / "lab", request.param, own)
    return lab, own, lab.replayed()


def test_every_preset_is_recorded(recorded: dict[str, Recorded]) -> None:
    assert recorded.keys() == PRESET_KEYS.keys()
    for pipeline in recorded.values():
        lengths = {len(answer) for step in pipeline.figures.steps for answer in step.answers}
        assert max(lengths) == 10 and len(lengths) > 5, "answers end early, and at the limit"
        assert len({score for step in pipeline.figures.steps for score in step.scores}) == 7


@pytest.mark.slow
def test_the_reference_loop_finds_what_is_recorded(replayed: tuple[Lab, Recorded, Figures]) -> None:
    """`python -m tests.commands.selftest.record` records anew, after a change that is meant to
    change results."""
    lab, recorded, _ = replayed
    found = reference(lab, lab.folder / "replayed")
    assert differences(recorded.figures, found).within(TOLERANCE)


def test_a_synchronous_run_finds_what_is_recorded(replayed: tuple[Lab, Recorded, Figures]) -> None:
    _, recorded, found = replayed
    assert differences(recorded.figures, found).within(TOLERANCE)


NAMES = {"score": "scores", "answer": "responses"}


@pytest.mark.parametrize("change", ["loss", "grad_norm", "log_prob", "weight", "score", "answer"])
def test_a_wrong_figure_is_found(replayed: tuple[Lab, Recorded, Figures], change: str) -> None:
    _, recorded, found = replayed
    *before, last = recorded.figures.steps
    first_answer = last.answers[0]
    first_log_probs = last.log_probs[0]
    wrong = {
        "loss": replace(
            last, updates={**last.updates, "actor/loss": last.updates["actor/loss"] + 1e-5}
        ),
        "grad_norm": replace(
            last,
            updates={**last.updates, "actor/grad_norm": last.updates["actor/grad_norm"] * 1.01},
        ),
        "log_prob": replace(
            last, log_probs=[[first_log_probs[0] - 1e-4, *first_log_probs[1:]], *last.log_probs[1:]]
        ),
        "score": replace(last, scores=[last.scores[0] + 0.5, *last.scores[1:]]),
        "answer": replace(
            last, answers=[[first_answer[0] + 1, *first_answer[1:]], *last.answers[1:]]
        ),
    }
    figures = replace(recorded.figures, steps=[*before, wrong.get(change, last)])
    if change == "weight":
        name = "actor.model.norm.weight"
        moved = figures.weights[name] + torch.tensor([1e-5] + [0.0] * 15)
        figures = replace(figures, weights={**figures.weights, name: moved})
    try:
        assert not differences(figures, found).within(TOLERANCE)
    except Exception as err:
        assert change in ("score", "answer") and f"other {NAMES[change]} in step 8" == str(err)


@pytest.mark.parametrize(("pipeline", "role"), TRAINED)
def test_every_weight_moved_far_beyond_the_tolerance(
    recorded: dict[str, Recorded], pipeline: str, role: str, tmp_path: Path
) -> None:
    """A run that goes nowhere would be equal to anything."""
    from safetensors.torch import load_file

    Lab.of(tmp_path / "lab", pipeline, recorded[pipeline])
    start = load_file(
        tmp_path / "lab" / {"actor": "policy", "critic": "critic"}[role] / "model.safetensors"
    )
    for name, weight in start.items():
        moved = (recorded[pipeline].figures.weights[f"{role}.{name}"] - weight).abs().max()
        assert moved > 200 * TOLERANCE, name


def test_what_is_written_is_read_again(recorded: dict[str, Recorded], tmp_path: Path) -> None:
    write_recorded(tmp_path / "again.json", recorded)
    assert (tmp_path / "again.json").read_bytes() == RECORDED.read_bytes()
