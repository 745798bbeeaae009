"""The figures that ship are those of the plain reference loop, today."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distflow.selftest.comparisons import TOLERANCE
from distflow.selftest.figures import Figures, differences
from distflow.selftest.reference_record import RECORDED, Recorded, read_recorded, write_recorded
from distflow.selftest.runs import PRESET_KEYS, Lab
from tests.selftest.record import reference

TRAINED = [("grpo", "actor"), ("ppo", "actor"), ("ppo", "critic")]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Recorded]:
    return read_recorded(RECORDED)


@pytest.fixture(scope="module", params=PRESET_KEYS)
def replayed(
    request: pytest.FixtureRequest, recorded: dict[str, Recorded], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Lab, Recorded, Figures]:
    """The recorded answers in a run of ours: where it was made, what is recorded of it, what it found."""
    own = recorded[request.param]
    lab = Lab.of(tmp_path_factory.mktemp("replayed") / "lab", request.param, own)
    return lab, own, lab.replayed()


def test_every_preset_is_recorded(recorded: dict[str, Recorded]) -> None:
    assert recorded.keys() == PRESET_KEYS.keys()
    for pipeline in recorded.values():
        lengths = {len(answer) for step in pipeline.figures.steps for answer in step.answers}
        assert max(lengths) == 10 and len(lengths) > 5, "answers end early, and at the limit"
        assert len({score for step in pipeline.figures.steps for score in step.scores}) == 7


def test_the_reference_loop_finds_what_is_recorded(replayed: tuple[Lab, Recorded, Figures]) -> None:
    """`python -m tests.selftest.record` records anew, after a change that is meant to change results."""
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
    first_answer, first_log_probs = last.answers[0], last.log_probs[0]
    wrong = {
        "loss": replace(last, updates={**last.updates, "actor/loss": last.updates["actor/loss"] + 1e-5}),
        "grad_norm": replace(last, updates={**last.updates, "actor/grad_norm": last.updates["actor/grad_norm"] * 1.01}),
        "log_prob": replace(last, log_probs=[[first_log_probs[0] - 1e-4, *first_log_probs[1:]], *last.log_probs[1:]]),
        "score": replace(last, scores=[last.scores[0] + 0.5, *last.scores[1:]]),
        "answer": replace(last, answers=[[first_answer[0] + 1, *first_answer[1:]], *last.answers[1:]]),
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
    start = load_file(tmp_path / "lab" / {"actor": "policy", "critic": "critic"}[role] / "model.safetensors")
    for name, weight in start.items():
        moved = (recorded[pipeline].figures.weights[f"{role}.{name}"] - weight).abs().max()
        assert moved > 200 * TOLERANCE, name


def test_what_is_written_is_read_again(recorded: dict[str, Recorded], tmp_path: Path) -> None:
    write_recorded(tmp_path / "again.json", recorded)
    assert (tmp_path / "again.json").read_bytes() == RECORDED.read_bytes()
