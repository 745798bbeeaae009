"""Whole runs in this process: when is validated, saved, kept; what a new start leaves out."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import UserError
from distflow.launch.build_worker import build_worker
from distflow.launch.one_process_launcher import launch_local, local_ports
from distflow.observe.run_reader import read_metrics, read_samples, sample_steps
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore, Writing
from distflow.runtime.checkpoint.files import read_manifest
from distflow.runtime.resources import Resources, build_resources
from distflow.runtime.run_recorder import Recorder
from distflow.runtime.spec import Spec
from distflow.runtime.stop_signals import StopRequest
from distflow.runtime.worker import Worker
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground, notes

CHEAP = ("trust.check_rewards=false", "actor_rollout_ref.rollout.n=2")


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=12)


def steps(folder: Path, kind: str) -> list[int]:
    return [record.step for record in read_metrics(folder) if record.kind == kind]


@pytest.mark.slow
def test_the_best_checkpoint_is_compared_by_a_validation_of_its_own_weights(ground):
    """Validated each third step and saved each second, a save would else carry the metric of older
    weights."""
    ground.write_reward(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if sum(map(ord, solution_str)) % 2 else 0.25\n"
    )
    keys = (
        "trainer.save_freq=2",
        "trainer.test_freq=3",
        "trainer.keep_best=true",
        "trainer.keep_last=9",
    )
    data = (f"data.val_files={ground.folder}/rows.jsonl", "trainer.total_epochs=2")
    run = ground.run("grpo", *CHEAP, *keys, *data)
    assert steps(run.folder, "val") == [2, 3, 4, 6]
    metrics = {
        r.step: r.values["val_correct/all/mean"]
        for r in read_metrics(run.folder)
        if r.kind == "val"
    }

    for step in (2, 4, 6):
        assert (
            read_manifest(run.folder / "checkpoints" / f"step-{step:06d}").metric == metrics[step]
        )


def test_a_step_has_the_same_number_in_every_file(ground):
    folder = ground.run("grpo", *CHEAP, "trainer.total_epochs=1").folder
    samples = {step: read_samples(folder, step) for step in sample_steps(folder)}
    groups = {
        step: {int(str(row["uid"]).partition("-")[0]) for row in rows}
        for step, rows in samples.items()
    }
    records = [record for _, record in timeline(folder / "ledger.jsonl")]
    consumed = {
        record["step"]: set(record["group_ids"])
        for record in records
        if record["kind"] == "consumed"
    }
    assert list(consumed) == steps(folder, "train") == [1, 2, 3] and consumed == groups
    assert [record["step"] for record in records if record["kind"] == "version"] == [1, 2, 3]
    generated = {
        step: {s["group_id"] for s in _lines(folder / "spans/rollout.jsonl", step)} - {None}
        for step in consumed
    }
    assert generated == consumed, "without staleness a step trains on the groups that it generated"

    for step in consumed:
        training = _lines(folder / "spans/training.jsonl", step)
        assert f"step {step}" in {span["what"] for span in training if span["kind"] == "wait"}
        assert [span["what"] for span in training].count("update_weights") == 1


def _lines(path: Path, step: int) -> list[dict[str, Any]]:
    """The objects of a file that are of a step."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"group_id": None, **line} for line in found if line["step"] == step]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("val_correct/al/mean", "'al'.*'all'"),
        ("val/accuracy", "choose one of .*val_correct/all/mean"),
    ],
)
def test_a_metric_that_no_validation_measures_cannot_say_which_is_best(ground, metric, said):
    keys = ("trainer.keep_best=true", f"trainer.keep_best_metric={metric}", "trainer.test_freq=1")
    data = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "trainer.total_epochs=1",
        "trainer.save_freq=1",
    )
    with pytest.raises(UserError, match=said):
        ground.run("grpo", *CHEAP, *keys, *data)


def test_validation_and_saving_also_come_after_the_last_step_and_once(ground):
    data = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.val_max_samples=2",
        "trainer.val_before_train=true",
    )
    run = ground.run(
        "grpo",
        *CHEAP,
        "trainer.save_freq=100",
        "trainer.test_freq=100",
        "trainer.total_epochs=1",
        *data,
    )
    assert steps(run.folder, "val") == [0, 3] and steps(run.folder, "train") == [1, 2, 3]
    assert [path.name for path in (run.folder / "checkpoints").glob("step-*")] == ["step-000003"]

    # Resumed after the end: nothing is measured or saved again.
    _, spec = ground.spec(
        "grpo",
        *CHEAP,
        "trainer.save_freq=100",
        "trainer.test_freq=100",
        "trainer.total_epochs=1",
        *data,
    )
    outcome = launch_local(spec)
    assert (outcome.steps, outcome.stopped) == (3, False) and outcome.report.exists()
    assert steps(run.folder, "val") == [0, 3]
    assert len(list((run.folder / "checkpoints").glob("step-*"))) == 1


@pytest.mark.slow
def test_where_the_last_rows_are_all_dropped_the_run_ends_validated_and_saved(ground):
    """Dynamic sampling leaves no group of the second half of the rows: the step before has been the
    last."""
    ground.write_rows(
        [{"prompt": f"{i}=", "answer": "good" if i < 6 else "dull"} for i in range(12)]
    )
    ground.write_reward(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(map(ord, solution_str)) % 97 / 96 if ground_truth == 'good' else 0.0\n"
    )
    keys = ("data.shuffle=false", "reward.overlong.buffer_tokens=0", "trainer.total_epochs=1")
    keys += ("data.train_batch_size=6", "trainer.save_freq=100", "trainer.test_freq=100")
    run = ground.run("dapo", *CHEAP, *keys, f"data.val_files={ground.folder}/rows.jsonl")
    assert run.outcome.steps == 1 and steps(run.folder, "val") == [1]
    assert [path.name for path in (run.folder / "checkpoints").glob("step-*")] == ["step-000001"]
    assert notes(run.folder, "info") == [
        "the data ended after 1 of 2 steps: groups were dropped (6 all_equal)"
    ]


def test_metrics_are_written_before_the_checkpoint_of_their_step(ground, monkeypatch):
    """A run killed right after a save resumes from there: what it measured until then must be
    there."""
    begin = CheckpointStore.begin
    seen = []

    def checked(self: CheckpointStore, step: int) -> Writing:
        lines = (ground.folder / "run" / "metrics.jsonl").read_text().splitlines()
        seen.append((step, json.loads(lines[-1])["step"]))
        return begin(self, step)

    monkeypatch.setattr(CheckpointStore, "begin", checked)
    ground.run("grpo", *CHEAP, "trainer.save_freq=1", "trainer.total_epochs=1")
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_weights_are_sent_at_the_start_and_after_each_update_and_tokens_say_of_which_version_they_are(  # noqa: E501
    ground,
):
    run = ground.run("grpo", *CHEAP, "trainer.total_epochs=1", "trainer.save_freq=1")
    for step, metrics in enumerate(run.metrics()):
        assert (metrics["async/version_start"], metrics["async/version_end"]) == (step, step)
        assert metrics["async/version_diff/mean"] == metrics["async/version_diff/max"] == 0

    assert {"timing_s/rollout", "timing_s/train_step", "timing_s/update_weights"} <= run.metrics()[
        -1
    ].keys()
    assert len(notes(run.folder, "canary")) == 1, "engine and trainer were compared at the start"
    resumed = ground.run("grpo", *CHEAP, "trainer.total_epochs=2", "trainer.save_freq=1")
    assert [metrics["async/version_start"] for metrics in resumed.metrics()] == [0, 1, 2, 3, 4, 5]
    assert len(notes(run.folder, "canary")) == 2, "and at the start of the resumed run"


@pytest.mark.slow
def test_what_nodes_keep_is_saved_and_goes_on_in_a_resumed_run(ground):
    kl = (f"algorithm.kl_ctrl.{key}" for key in ("type=adaptive", "target_kl=0.01", "horizon=50"))
    keys = (
        "trust.check_rewards=false",
        "actor_rollout_ref.rollout.n=1",
        "trainer.save_freq=1",
        *kl,
    )
    keys = (*keys, "trust.check_freq=0")  # `ends_at` changes the run behind the schedule's back
    whole = ground.run("ppo", *keys, "trainer.total_training_steps=3", name="whole")
    coefficients = [metrics["actor/kl_coef"] for metrics in whole.metrics()]
    assert len(set(coefficients)) == 3
    ground.run("ppo", *keys, "trainer.total_epochs=1", name="parts", spoil=ends_at(2))
    resumed = ground.run("ppo", *keys, "trainer.total_epochs=1", name="parts")
    assert [metrics["actor/kl_coef"] for metrics in resumed.metrics()] == coefficients
    kept = CheckpointStore(resumed.folder / "checkpoints").load().load("run")["nodes"]
    assert list(kept["kl_penalty"]) == ["value"]


def ends_at(step: int) -> Callable[[Spec], Spec]:
    return lambda spec: replace(spec, data=replace(spec.data, total_steps=step))


@pytest.mark.slow
def test_a_fault_of_the_reward_function_in_a_validation_is_none_of_the_next_step(ground):
    ground.write_reward(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if ground_truth == 'bad':\n"
        "        raise KeyError(ground_truth)\n"
        "    return sum(map(ord, solution_str)) % 7 / 6\n"
    )
    bad = '{"prompt": "ab0=", "answer": "bad"}\n'
    (ground.folder / "bad.jsonl").write_text(bad)
    keys = (
        f"data.val_files={ground.folder}/bad.jsonl",
        "trainer.val_before_train=true",
        "trainer.total_epochs=1",
    )
    run = ground.run("grpo", *CHEAP, *keys)
    validated = [record.values for record in read_metrics(run.folder) if record.kind == "val"]
    assert [values["val/errors"] for values in validated] == [1.0]
    assert [metrics["reward/errors"] for metrics in run.metrics()] == [0.0] * 3


SFT = (
    "data.response_key=answer",
    "~reward.functions",
    "~reward.num_workers",
    "~custom_reward_function.path",
    "~actor_rollout_ref.rollout.n",
    "trainer.total_epochs=1",
)


@contextmanager
def working(ground: Playground, *keys: str) -> Iterator[tuple[Worker, Resources]]:
    """A worker of an SFT run that has started."""
    _, spec = ground.spec("sft", *SFT, *keys)
    resources = build_resources(spec.factories, spec.plan.ranks[0])
    coordinator = Coordinator(spec.data)

    with (
        Recorder(spec, spec.data.total_steps, 0, None) as recorder,
        StopRequest(lambda name: None) as stop,
    ):
        ports = local_ports(coordinator, recorder.waits)
        store = CheckpointStore(spec.run_dir / "checkpoints")
        with build_worker(
            WorkerInputs(spec, 0, resources, ports, recorder, store, stop, {}, coordinator.version)
        ) as worker:
            yield worker, resources


def test_a_signal_that_comes_when_the_step_is_already_done_saves_it_too(ground, monkeypatch):
    """As during the export of its profile."""
    with working(ground, "trainer.save_freq=100") as (worker, _):

        @contextmanager
        def profiled(recorder: Recorder, step: int) -> Iterator[None]:
            yield
            worker._stop.wanted = True

        monkeypatch.setattr(Recorder, "profiled", profiled)
        assert worker.training_loop() == 1

    assert CheckpointStore(ground.folder / "run" / "checkpoints").load().step == 1


def test_a_rollout_loop_that_ends_wakes_the_trainer_with_its_reason(ground, monkeypatch):
    def broken(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("the queue broke")

    monkeypatch.setattr("distflow.runtime.sample_queue.local.LocalSampleQueue.end_groups", broken)
    with working(ground) as (worker, _), pytest.raises(RuntimeError, match="the queue broke"):
        worker.training_loop()
