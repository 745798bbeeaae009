"""The pairs on a healthy machine, and with a fault in one of their runs."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from distflow.cli import main
from distflow.cluster.ray_launcher import own_ray
from distflow.commands.selftest import compared_runs, runs
from distflow.commands.selftest.compared_runs import Row, compare, of_paths, of_workers
from distflow.commands.selftest.runs import RECORDED, Recorded, read_recorded
from distflow.observe.run_reader import read_metrics
from distflow.rollout import engine_weights
from distflow.rollout.embedded import engine
from tests.commands.selftest.record import write_recorded
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


def only(pipeline: str) -> dict[str, Recorded]:
    return {pipeline: read_recorded(RECORDED)[pipeline]}


@pytest.fixture
def started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that every new process of Python runs first."""
    (tmp_path / "first").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "first")
    yield tmp_path / "first" / "sitecustomize.py"


def of_one_process(pipeline: str, folder: Path) -> Iterator[Callable[[], Row]]:
    """Compares a pair each: the reference loop, the asynchronous path, the run that is killed."""
    (recorded,) = only(pipeline).values()
    lab = runs.Lab.of(folder, pipeline, recorded)
    return (
        partial(compare, lab, pair) for pair in of_paths(lab, recorded.figures, cache(lab.sync))
    )


@pytest.mark.slow
@pytest.mark.by_hand
def test_the_asynchronous_path_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the pair would compare a run with itself. The engine decodes on a thread of its own, on
    a copy of the weights that is sent, and compared by the canary, each time."""
    original, threads = engine.EmbeddedEngine.step, set[tuple[bool, bool]]()

    def step(self: engine.EmbeddedEngine) -> None:
        threads.add((self.shares_weights, threading.current_thread() is threading.main_thread()))
        original(self)

    monkeypatch.setattr(engine.EmbeddedEngine, "step", step)
    _, asynchronous, _ = of_one_process("grpo", tmp_path / "runs")
    assert asynchronous().ok
    canary = {
        run: [
            "canary/mean_abs" in record.values for record in read_metrics(tmp_path / "runs" / run)
        ]
        for run in ("sync", "async")
    }
    assert canary == {"sync": [False] * 8, "async": [True] * 8}
    assert (True, True) in threads, (
        "the synchronous engine decodes while the trainer waits, on its thread"
    )
    assert {on_main for shares, on_main in threads if not shares} == {False}


@pytest.mark.by_hand
@pytest.mark.slow
def test_an_engine_with_a_changed_weight_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed by so little that no check of the run itself minds, behind the receipt."""
    original = engine_weights.copy_weights

    def copy_weights(module: torch.nn.Module, weights: object) -> dict[str, str]:
        hashes = original(module, weights)  # type: ignore[arg-type]
        with torch.no_grad():
            next(iter(module.parameters())).view(-1)[40:60] += 1e-4
        return hashes

    monkeypatch.setattr(engine_weights, "copy_weights", copy_weights)
    reference, asynchronous, _ = of_one_process("grpo", tmp_path / "runs")
    assert reference().ok and not (found := asynchronous()).ok
    assert found.fault or found.found.log_prob > 0  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_run_that_fails_is_a_row_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(module: torch.nn.Module, weights: object) -> dict[str, str]:
        raise ValueError("no such weights")

    monkeypatch.setattr(engine_weights, "copy_weights", broken)
    _, asynchronous, _ = of_one_process("grpo", tmp_path / "runs")
    assert not (found := asynchronous()).ok and "no such weights" in found.fault


@pytest.mark.slow
def test_a_wrong_figure_turns_the_command_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row, and no other; what is left behind is named."""
    (pipeline,) = only("grpo").values()
    step = pipeline.figures.steps[0]
    wrong = replace(step, updates={**step.updates, "actor/loss": step.updates["actor/loss"] + 1e-4})
    figures = replace(pipeline.figures, steps=[wrong, *pipeline.figures.steps[1:]])
    write_recorded(tmp_path / "wrong.json", {"grpo": replace(pipeline, figures=figures)})
    monkeypatch.setattr(runs, "RECORDED", tmp_path / "wrong.json")
    original = compared_runs.of_paths
    monkeypatch.setattr(compared_runs, "of_paths", lambda *arguments: original(*arguments)[:2])
    monkeypatch.setattr(compared_runs, "is_installed", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["selftest"]) == 1
    said = capsys.readouterr().out
    reward_results = [line.split()[-1] for line in said.splitlines() if line.startswith("grpo ")]
    assert reward_results == ["FAILED", "ok", "out", "out", "out"]
    (kept,) = tmp_path.glob("distflow-selftest-*")
    assert f"{kept}/PIPELINE/RUN" in said and (kept / "grpo" / "replayed" / "report.html").is_file()
    assert (
        "reference loop" in said.partition("FAILED: ")[2]
        and "they differ by more than the limit" in said
    )


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["grpo", "ppo"])
def test_a_weight_that_is_changed_when_a_run_is_resumed_is_found(
    pipeline: str, tmp_path: Path, started_with: Path
) -> None:
    started_with.write_text(PERTURBED)
    *_, killed = of_one_process(pipeline, tmp_path / "runs")
    found = killed()
    assert not found.ok and "the resumed run ended with status 1" in found.fault
    (log,) = (tmp_path / "runs").rglob("killed.log")
    assert "(resume)" in log.read_text(), (
        "the run's own check ends it before its numbers can differ"
    )


@pytest.mark.by_hand
@pytest.mark.slow
def test_a_run_that_begins_anew_was_not_resumed(tmp_path: Path, started_with: Path) -> None:
    """Though its numbers are those of the whole run."""
    started_with.write_text(BEGUN_ANEW)
    *_, killed = of_one_process("grpo", tmp_path / "runs")
    assert not (found := killed()).ok and "did not resume from" in found.fault


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("pipeline", "fault"),
    one_fast_in(2, [("grpo", "mean_of_means"), ("ppo", "idle_rank")], unpack=True, others=BY_HAND),
)
def test_ranks_that_are_not_added_up_exactly_are_found(
    pipeline: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In replicas and in shards."""
    keys = (*runs.PRESET_KEYS[pipeline], f"trainer.imports=[tests.commands.selftest.{fault}]")
    monkeypatch.setitem(runs.PRESET_KEYS, pipeline, keys)
    (recorded,) = only(pipeline).values()
    lab = runs.Lab.of(tmp_path / "lab", pipeline, recorded)
    with own_ray(tmp_path / "ray", 2):
        _, *several = of_workers(lab, cache(lab.sync), lambda: None)
        replicas, shards = (compare(lab, pair) for pair in several)
    assert not replicas.ok and not shards.ok
    assert replicas.found is None or replicas.found.weight > replicas.limit


def test_without_ray_its_pairs_are_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(compared_runs, "is_installed", lambda: False)
    monkeypatch.setattr(compared_runs, "of_paths", lambda *arguments: [])
    assert main(["selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith(("grpo ", "ppo "))] == [
        ["left", "out"]
    ] * 6
    assert "6 of 6 pairs were left out and are not verified. Ray is not installed" in lines[-1]
    assert "pip install 'distflow[ray]'" in lines[-1]


def test_pairs_whose_ray_does_not_start_are_left_out_and_have_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a machine that is too busy: Ray waits 30 s for its own processes."""

    def give_up(**arguments: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("ray.init", give_up)
    monkeypatch.setattr(compared_runs, "of_paths", lambda *arguments: [])
    monkeypatch.setattr(runs.Lab, "sync", lambda lab: None)
    assert main(["selftest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith(("grpo ", "ppo "))] == [
        ["left", "out"]
    ] * 6
    assert (
        "6 of 6 pairs were left out and are not verified. Ray could not be started on this "
        "machine: The"
    ) in lines[-1]
    assert not any("Do not trust" in line for line in lines)


@pytest.mark.by_hand
@pytest.mark.slow
@pytest.mark.alone
def test_all_pairs_are_equal_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["selftest"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines if line[0] in ("grpo", "ppo")] == ["ok"] * 12
    assert not list(tmp_path.glob("distflow-selftest-*"))


def test_bad_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["selftest", "grpo"])
    assert left.value.code == 2 and "unrecognized arguments: grpo" in capsys.readouterr().err
