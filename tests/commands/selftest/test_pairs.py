"""The pairs on a healthy machine, and with a fault in one of their runs."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from distflow.cli import main
from distflow.cluster.ray_launcher import own_ray
from distflow.commands.selftest import pairs, runs
from distflow.commands.selftest.pairs import Pair, compare, pairs_of
from distflow.commands.selftest.runs import Figures, Lab, Unlike, differences
from distflow.rollout import engine_weights
from tests.sparse_params import BY_HAND, one_fast_in

PERTURBED = """
import distflow.launch.one_process_launcher as local
original = local.restore

def restore(checkpoint, resources):
    found = original(checkpoint, resources)
    next(iter(resources.actor.model.parameters())).data.view(-1)[0] += 1e-6
    return found

local.restore = restore
"""
BEGUN_ANEW = """
import distflow.launch.run_start as begin
begin.find_checkpoint = lambda store, mode: None
"""
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


@pytest.fixture
def started_with(tmp_path, monkeypatch):
    """A file that every new process of Python runs first."""
    (tmp_path / "first").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "first")
    yield tmp_path / "first" / "sitecustomize.py"


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


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["grpo", "ppo"])
def test_a_weight_that_is_changed_when_a_run_is_resumed_is_found(pipeline, tmp_path, started_with):
    started_with.write_text(PERTURBED)
    lab, _, killed = of_one_process(pipeline, tmp_path / "runs")
    found = compare("killed", lab.sync, killed)
    assert found.outcome == "failed" and "the resumed run ended with status 1" in found.text
    (log,) = (tmp_path / "runs").rglob("killed.log")
    assert "(resume)" in log.read_text(), (
        "the run's own check ends it before its numbers can differ"
    )


@pytest.mark.by_hand
@pytest.mark.slow
def test_a_run_that_begins_anew_was_not_resumed(tmp_path, started_with):
    """Though its numbers are those of the whole run."""
    started_with.write_text(BEGUN_ANEW)
    lab, _, killed = of_one_process("grpo", tmp_path / "runs")
    found = compare("killed", lab.sync, killed)
    assert found.outcome == "failed" and "did not resume from" in found.text


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("pipeline", "fault"),
    one_fast_in(2, [("grpo", "mean_of_means"), ("ppo", "idle_rank")], unpack=True, others=BY_HAND),
)
def test_ranks_that_are_not_added_up_exactly_are_found(pipeline, fault, tmp_path, monkeypatch):
    """In replicas and in shards."""
    keys = (*runs.PRESET_KEYS[pipeline], f"trainer.imports=[tests.commands.selftest.{fault}]")
    monkeypatch.setitem(runs.PRESET_KEYS, pipeline, keys)
    lab = Lab.of(tmp_path / "lab", pipeline)

    with own_ray(tmp_path / "ray", 2):
        *_, replicas, shards = pairs_of(lab, lambda: None)
        sync = cache(lab.sync)
        assert compare("replicas", sync, replicas).outcome == "failed"
        assert compare("shards", sync, shards).outcome == "failed"


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
