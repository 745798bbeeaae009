"""What a run reports: kept groups, how it ended, and that reporting never hides what went wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.config.keys.schema import with_values
from distflow.errors import TrustError, UserError
from distflow.models.loading import load_tokenizer
from distflow.observe.crash_safe_files import read_object
from distflow.observe.findings.summary import describe_checks
from distflow.observe.report.build import report_data
from distflow.observe.run_reader import read_events, read_samples, sample_splits, sample_steps
from distflow.observe.writing.run_folder import RunFolder
from distflow.runtime.run_recorder import Recorder, ReportingProcess, reported
from distflow.runtime.saved_groups import TOKEN_TEXTS
from distflow.runtime.spec import Spec
from tests.e2e.runs import Playground
from tests.runtime.groups import group


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return Playground(tmp_path_factory.mktemp("ground")).spec("grpo")[1]


def silent(spec: Spec, folder: Path, **trainer: Any) -> Spec:
    """The spec of a run in the folder, without trackers. trainer: keys of `trainer`."""
    values = {f"trainer.{name}": value for name, value in {"logger": (), **trainer}.items()}
    return replace(spec, run_dir=folder, config=with_values(spec.config, values))


def record(spec: Spec, folder: Path, **trainer: Any) -> Recorder:
    return Recorder(silent(spec, folder, **trainer), 5, 0, None)


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        ({"save_groups": "none"}, []),
        ({"save_groups": "all"}, [1, 2, 3, 4]),
        ({"save_groups": "last_k", "save_groups_last": 2}, [3, 4]),
    ],
)
def test_groups_are_kept_as_asked(spec, tmp_path, mode, left):
    tokenizer = load_tokenizer("builtin:tiny-arithmetic")
    with record(spec, tmp_path / "run", **mode) as recorder:
        for step in range(1, 5):
            recorder.keep_groups(step, group(), tokenizer)
        recorder.status = "finished"

    found = sorted(path.name for path in (tmp_path / "run").glob("tokens/*"))
    assert found == [f"{step:06d}.safetensors" for step in left] + ([TOKEN_TEXTS] if left else [])

    if left:
        texts = read_object(tmp_path / "run" / "tokens" / TOKEN_TEXTS)["texts"]
        assert "".join(texts[token] for token in tokenizer("1+2=")["input_ids"]) == "1+2="
        assert len(texts) == len(tokenizer)


def test_spans_of_each_worker_are_there_after_a_step_whatever_becomes_of_it(spec, tmp_path):
    spec = silent(spec, tmp_path / "run")
    for part, name in enumerate(("training.jsonl", "training-1.jsonl")):
        recorder = Recorder(spec, 5, 0, None, process=ReportingProcess(part))
        with recorder.waits("training", "step 0", on="rollout"):
            pass
        recorder.training_step(1, {"actor/loss": 1.0}, group())
        (line,) = (tmp_path / "run" / "spans" / name).read_text().splitlines()
        assert json.loads(line)["on"] == "rollout"
        recorder.folder.close()

    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 1, "of the worker that leads"


def test_what_a_resumed_run_records_has_its_step_from_the_start(spec, tmp_path):
    spec = silent(spec, tmp_path / "run")
    with Recorder(spec, 5, 1, 3) as recorder:
        with recorder.phases("train_step"):
            recorder.note("warning", "before the first step has ended")
        recorder.training_step(4, {"actor/loss": 1.0}, group())

    (line,) = (tmp_path / "run" / "spans" / "training.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 4
    assert [event.step for event in read_events(tmp_path / "run") if event.kind == "warning"] == [3]


def test_a_finding_that_opens_is_an_event(spec, tmp_path):
    with Recorder(silent(spec, tmp_path / "run"), 50, 0, None) as recorder:
        for step in range(1, 15):
            recorder.training_step(step, {"actor/skipped": 1.0}, group())
    (found,) = (event for event in read_events(tmp_path / "run") if event.kind == "finding")
    assert found.fields["rule"] == "skipped-updates"
    assert "optimizer skipped an update" in found.message


def test_checks_of_steps_that_a_resume_repeats_count_once(spec, tmp_path):
    spec = silent(spec, tmp_path / "run")
    for restart, resumed_at in ((0, None), (1, 1)):
        with Recorder(spec, 5, restart, resumed_at) as recorder:
            for step in range(1 + (resumed_at or 0), 4):
                recorder._step = step - 1
                recorder.checked(f"step {step}", ["groups"], {})
            recorder._step = 3
            recorder.checked("the validation after step 3", ["validation"], {}, of="validation")

    events = read_events(tmp_path / "run")
    assert [event.step for event in events if event.kind == "checks"] == [1, 2, 3, 3, 2, 3, 3]
    assert describe_checks(events).text.startswith("3 steps were checked whole")


def test_how_a_run_ended_is_the_last_event(spec, tmp_path):
    for status in ("finished", "stopped"):
        with record(spec, tmp_path / status) as recorder:
            recorder.status = status
        end = read_events(tmp_path / status)[-1]
        assert (end.kind, end.fields["status"]) == ("end", status)

    with pytest.raises(KeyError), record(spec, tmp_path / "failed"):
        raise KeyError("what went wrong")
    error, end = read_events(tmp_path / "failed")[-2:]
    assert (error.kind, error.message) == ("error", "KeyError: 'what went wrong'")
    assert end.fields["status"] == "failed"


@pytest.mark.parametrize(
    "error", [UserError("your\nmistake"), TrustError("a check"), KeyError("ours"), SystemExit(3)]
)
def test_a_run_that_fails_leaves_a_report_with_its_error(spec, tmp_path, error):
    said: list[str] = []
    with (
        pytest.raises(type(error)),
        reported(tmp_path / "run", said.append),
        record(spec, tmp_path / "run"),
    ):
        raise error

    assert said == [f"report of the failed run: {tmp_path}/run/report.html"]
    data = report_data(tmp_path / "run")
    assert data["status"]["word"] == "failed" and data["failure"] is not None
    message = {
        UserError: "your\nmistake",
        TrustError: "a check",
        KeyError: "KeyError: 'ours'",
        SystemExit: "SystemExit: 3",
    }
    assert data["failure"]["message"] == message[type(error)]
    assert ("test_run_recorder.py" in data["failure"]["traceback"]) == (
        type(error) is not UserError
    )
    assert data["sentences"][0]["text"].startswith(
        "A check stopped" if type(error) is TrustError else "It failed"
    )
    assert (tmp_path / "run" / "report.html").is_file()


def test_responses_of_groups_that_a_node_drops_are_kept_with_the_reason(spec, tmp_path):
    with record(spec, tmp_path / "run") as recorder:
        for number in range(3):
            recorder.group_dropped(0, "all_equal", group(number))
        recorder.status = "finished"

    assert sample_splits(tmp_path / "run") == [] and sample_steps(tmp_path / "run", "dropped") == [
        1
    ]
    rows = read_samples(tmp_path / "run", 1, "dropped")
    assert {row["uid"] for row in rows} == {
        f"{number}-{i}" for number in range(3) for i in range(2)
    }
    assert {row["dropped"] for row in rows} == {"all_equal"} and rows[0]["response"] == "r0"

    # Those of a worker that leads nothing are found too, and those of a start that was taken back
    # are not.
    other = RunFolder(tmp_path / "run", 1, resumed_at=0, part=2)
    other.samples(4, [{"uid": "9-0"}], split="dropped")
    other.event("start", "", resumed_at=0)
    other.close()
    assert sample_steps(tmp_path / "run", "dropped") == [1, 4]
    assert [row["uid"] for row in read_samples(tmp_path / "run", 4, "dropped")] == ["9-0"]
    assert read_samples(tmp_path / "run", 1, "dropped") == []
