"""Trackers get every value, and whatever they do the run goes on and hears of it once."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from distflow.observe.writing.trackers import (
    TrackedRun,
    TrackerError,
    Trackers,
    open_trackers,
)


class Recorder:
    """Keeps what it gets; raises at `fail_at`, waits for `gate` before each step."""

    def __init__(self, fail_at: int | None = None, gate: threading.Event | None = None):
        self.got: list[tuple[int, dict[str, float]]] = []
        self.fail_at = fail_at
        self.gate = gate
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.gate:
            self.gate.wait()
        if step == self.fail_at:
            raise ConnectionError("no route to host")
        self.got.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def collect_events() -> tuple[list[tuple[str, str]], Callable[[str, str], None]]:
    events: list[tuple[str, str]] = []
    return events, lambda kind, message: events.append((kind, message))


def test_all_get_copies_in_order():
    near = Recorder()
    far = Recorder()
    trackers = Trackers([near], {"far": lambda: far})

    values = {"x": 0.0}
    for step in range(50):
        values["x"] = float(step)
        trackers.log(step, values)

    trackers.close()
    assert near.got == far.got == [(step, {"x": float(step)}) for step in range(50)]
    assert near.closed and far.closed


@pytest.mark.parametrize("where", ["build", "log", "exit"])
def test_one_that_fails_is_named_once_and_the_others_go_on(where):
    events, on_failure = collect_events()
    good = Recorder()

    def build() -> Recorder:
        if where == "build":
            raise RuntimeError("bad key")
        if where == "exit":
            raise SystemExit(3)
        return Recorder(fail_at=2)

    trackers = Trackers([], {"bad": build, "good": lambda: good}, on_failure)
    for step in range(5):
        trackers.log(step, {"x": math.nan})
    trackers.close()
    assert len(events) == 1 and events[0][0] == "warning" and "tracker bad failed" in events[0][1]
    assert [step for step, _ in good.got] == [0, 1, 2, 3, 4]


def test_one_that_hangs_neither_blocks_nor_fills_the_memory():
    events, on_failure = collect_events()
    gate = threading.Event()
    stuck = Recorder(gate=gate)
    trackers = Trackers([], {"stuck": lambda: stuck}, on_failure, close_timeout_s=0.05)
    for step in range(2000):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert len(events) == 1 and "tracker stuck is too slow" in events[0][1]
    gate.set()
    assert len(stuck.got) < 400


def test_remote_ones_get_a_table_of_samples():
    class Everything(Recorder):
        tables: list[tuple[int, list[Mapping[str, str]]]] = []

        def samples(self, step: int, rows: Sequence[Mapping[str, str]]) -> None:
            self.tables.append((step, list(rows)))

    far = Everything()
    trackers = Trackers([], {"far": lambda: far})
    rows = [
        {"uid": f"{i}-0", "score": i / 40, "response": "r" * 5000, "more": 1} for i in range(41)
    ]
    trackers.log(3, {"reward/mean_score": 0.5, "other": 1.0})
    trackers.samples(3, [*rows, {"uid": "failed", "score": None, "prompt": "\ud800"}])
    trackers.samples(4, [])
    trackers.close()
    assert far.got == [(3, {"reward/mean_score": 0.5, "other": 1.0})]
    ((step, table),) = far.tables
    assert step == 3 and [row["score"] for row in table] == [
        "1.0",
        "0.875",
        "0.725",
        "0.575",
        "0.425",
        "0.275",
        "0.125",
        "",
    ]
    assert (
        table[-1]["prompt"] == "\\ud800"
        and len(table[0]["response"]) < 2010
        and "more" not in table[0]
    )


def open_some(names: list[str], folder: Path, events: list) -> Trackers:
    run = TrackedRun(folder, "p", "e", {"trainer": {"seed": 1}, "bad": math.nan})
    fail = lambda kind, message: events.append(message)  # noqa: E731
    return open_trackers(names, run, local={"console": Recorder()}, on_failure=fail)


def test_tensorboard_files_are_read_by_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: list[str] = []
    trackers = open_some(["tensorboard"], tmp_path, events)

    for step in (1, 2, 3):
        trackers.log(
            step, {"reward/mean_score": step / 2, "actor/grad_norm": math.nan if step == 2 else 1.0}
        )

    trackers.samples(1, [{"uid": "0-0", "response": "<b>a|b\n"}])
    trackers.close()
    assert events == []
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["actor/grad_norm", "reward/mean_score"]
    assert set(found.Tags()["tensors"]) == {"samples"}
    table = found.Tensors("samples")[0].tensor_proto.string_val[0].decode()
    assert '"response": "<b>a|b\\n"' in table
    assert all(line.startswith("    ") for line in table.splitlines())
    assert [(e.step, e.value) for e in found.Scalars("reward/mean_score")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
    ]
    assert math.isnan(found.Scalars("actor/grad_norm")[1].value)


@pytest.mark.slow
def test_wandb_offline_writes_a_run_and_a_resume_goes_on_in_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    events: list[str] = []

    for first in (1, 3):
        trackers = open_some(["wandb"], tmp_path, events)
        for step in (first, first + 1):
            trackers.log(step, {"reward/mean_score": 0.5, "actor/grad_norm": math.nan})
            trackers.samples(step, [{"uid": "0-0", "response": "r", "score": 1.0}])
            trackers.close()

    assert events == []
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1

    # wandb's own process may still be writing when `finish` has returned.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all(
        b"reward/mean_score" in file.read_bytes() for file in files
    ):
        time.sleep(0.05)

    assert all(b"reward/mean_score" in file.read_bytes() for file in files)


STEPS = [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


def track_two_starts(name: str, folder: Path) -> None:
    """Four steps, two of them after a resume."""
    events: list[str] = []
    for first in (1, 3):
        trackers = open_some([name], folder, events)
        for step in (first, first + 1):
            values = {
                "reward/mean_score": step / 2,
                "actor/grad_norm": math.nan if step == 2 else 1.0,
            }
            trackers.log(step, {**values, "val_correct/all/pass@4": 0.5})
            trackers.samples(step, [{"uid": "0-0", "response": "r", "score": 1.0}])
            trackers.close()

    assert events == []


@pytest.mark.slow
def test_mlflow_has_one_run_of_both_starts_in_the_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track_two_starts("mlflow", tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (run.info.run_name, run.info.status) == ("e", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward/mean_score")
    assert sorted((each.step, each.value) for each in history) == STEPS
    assert run.data.metrics["val_correct/all/pass_at_4"] == 0.5
    assert '"seed": 1' in next(tmp_path.glob("mlartifacts/*/artifacts/config.json")).read_text()


@pytest.mark.slow
def test_trackio_has_one_run_of_both_starts_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "all"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    track_two_starts("trackio", tmp_path)
    (run,) = SQLiteStorage.get_runs("p")
    assert run.startswith("e-")
    assert [
        (each["step"], each["reward/mean_score"]) for each in SQLiteStorage.get_logs("p", run)
    ] == STEPS


@pytest.mark.slow
def test_swanlab_without_a_key_is_offline_and_never_asks(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    track_two_starts("swanlab", tmp_path)
    files = list((tmp_path / "swanlog").glob("run-*/run-*.swanlab"))
    assert len(files) == 2 and all(b"reward/mean_score" in file.read_bytes() for file in files)


def test_an_unknown_tracker_is_refused_with_the_choice(tmp_path):
    known = "console, file, jsonl, mlflow, swanlab, tensorboard, trackio, wandb"
    with pytest.raises(TrackerError, match=f"'comet'.*known: {known}"):
        open_some(["comet"], tmp_path, [])


def test_the_console_is_used_when_it_is_asked_for(tmp_path):
    for names, number in ((["console", "console"], 1), ([], 0)):
        console = Recorder()
        run = TrackedRun(tmp_path, "p", "e", {})
        trackers = open_trackers(names, run, local={"console": console}, on_failure=print)
        trackers.log(1, {"x": 1.0})
        trackers.close()
        assert len(console.got) == number
