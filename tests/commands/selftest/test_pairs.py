"""The pairs on a healthy machine, and with a fault in one of their runs."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distflow.cli import main
from distflow.commands.selftest import pairs, runs
from distflow.commands.selftest.pairs import Pair, compare, pairs_of
from distflow.commands.selftest.runs import Figures, Lab, Unlike, differences
from distflow.rollout import engine_weights

FIGURES = Figures(
    [([1, 2], [5, 6, 7], [0.5, 0.0]), ([1], [5], [1.0])],
    {"loss": torch.tensor([0.25, 0.5]), "weight": torch.tensor([1.0, 4.0])},
)


def with_numbers(**changes: list[float]) -> Figures:
    changed = {name: torch.tensor(values) for name, values in changes.items()}
    return replace(FIGURES, numbers={**FIGURES.numbers, **changed})


def test_differences_are_the_largest_of_each_kind_beyond_1_as_a_share():
    assert differences(FIGURES, FIGURES) == {"loss": 0.0, "weight": 0.0}
    other = with_numbers(loss=[0.25, 0.25], weight=[1.125, 5.0])
    assert differences(FIGURES, other) == {"loss": 0.25, "weight": 0.25}


@pytest.mark.parametrize("kind", ["loss", "weight"])
def test_a_figure_that_is_no_number_is_found(kind):
    wrong = with_numbers(**{kind: [math.nan, 0.5]})
    for one, other in ((FIGURES, wrong), (wrong, FIGURES)):
        found = differences(one, other)
        assert math.isnan(found[kind]) and not pairs.within(found, math.inf)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(FIGURES, trained_on=FIGURES.trained_on[:1]), "2 steps and 1"),
        (replace(FIGURES, trained_on=[FIGURES.trained_on[0], ([1], [8], [1.0])]), "step 2"),
        (with_numbers(weight=[1.0]), "weights"),
    ],
)
def test_what_has_no_distance_is_named(other, what):
    with pytest.raises(Unlike, match=what):
        differences(FIGURES, other)


def of_one_process(preset: str, folder: Path) -> tuple[Lab, Pair, Pair]:
    """The asynchronous path, and the run that is killed."""
    lab = Lab.of(folder, preset)
    asynchronous, killed, *_ = pairs_of(lab, lambda: None)
    return lab, asynchronous, killed


@pytest.mark.by_hand
@pytest.mark.slow
def test_an_engine_with_a_changed_weight_is_found(tmp_path, monkeypatch):
    """Changed by so little that no check of the run itself minds, behind the receipt."""
    original = engine_weights.copy_weights

    def copy_weights(module: torch.nn.Module, weights: object) -> dict[str, str]:
        hashes = original(module, weights)  # type: ignore[arg-type]
        with torch.no_grad():
            next(iter(module.parameters())).view(-1)[40:60] += 1e-4
        return hashes

    monkeypatch.setattr(engine_weights, "copy_weights", copy_weights)
    lab, asynchronous, _ = of_one_process("grpo", tmp_path / "runs")
    assert compare("async", lab.sync, asynchronous).outcome == "failed"


@pytest.mark.slow
def test_a_run_that_fails_turns_the_command_red(tmp_path, monkeypatch, capsys):
    """Its line, and no other; what is left behind is named."""

    def broken(module: torch.nn.Module, weights: object) -> dict[str, str]:
        raise ValueError("no such weights")

    monkeypatch.setattr(engine_weights, "copy_weights", broken)
    monkeypatch.setattr(runs, "PRESET_KEYS", {"grpo": runs.PRESET_KEYS["grpo"]})
    monkeypatch.setattr(pairs, "PRESET_KEYS", {"grpo": runs.PRESET_KEYS["grpo"]})
    monkeypatch.setattr(pairs, "is_installed", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["selftest"]) == 1
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("grpo, ")]
    assert [line[43:52].strip() for line in lines] == ["failed", "ok", *["left out"] * 3]
    assert "no such weights" in lines[0] and "3 of 5 pairs are not verified" in said
    assert "distflow[ray]" in lines[2]
    (kept,) = tmp_path.glob("distflow-selftest-*")
    assert f"{kept}/PIPELINE/RUN" in said and (kept / "grpo" / "sync" / "report.html").is_file()


def test_pairs_whose_ray_does_not_start_are_left_out_and_have_not_failed(tmp_path, monkeypatch):
    """As on a machine that is too busy: Ray waits 30 s for its own processes."""

    def give_up(**arguments: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", give_up)
    for name in ("sync", "asynchronous"):
        monkeypatch.setattr(Lab, name, lambda lab: FIGURES)
    monkeypatch.setattr(Lab, "killed", lambda lab, after: FIGURES)
    found = [each.outcome for each in pairs.compare_all(tmp_path)]
    assert found == ["ok", "ok", "left out", "left out", "left out"] * 2


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.alone
def test_all_pairs_are_equal_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if line.startswith(("grpo", "ppo"))]
    assert [line[43:52].strip() for line in lines] == ["ok"] * 10
    assert not list(tmp_path.glob("distflow-selftest-*"))


def test_bad_usage_is_2(capsys):
    with pytest.raises(SystemExit) as left:
        main(["selftest", "grpo"])
    assert left.value.code == 2 and "unrecognized arguments: grpo" in capsys.readouterr().err
