"""`distflow report RUN --trace`: what the file holds of which steps, also of runs that were
killed or resumed, and of any folder."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.observe.writing.run_folder import RunFolder, Span
from tests.e2e.hostile_folders import KINDS


def write_run(
    folder: Path, first: int = 1, last: int = 8, restart: int = 0, ends: bool = True
) -> Path:
    """Steps of ten seconds, step n from time 1000 + 10 n on: two groups that overlap, a wait, and
    two phases, one within the other. Another worker decodes."""
    with (
        RunFolder(folder, restart, first - 1 if restart else None) as run,
        RunFolder(folder, restart, part=2) as other,
    ):
        for step in range(first, last + 1):
            t = 1000.0 + 10 * step + restart / 2
            for i in range(2):
                run.span(
                    "rollout",
                    Span(
                        t + i,
                        t + 4 + i,
                        "group",
                        "complete",
                        step,
                        group_id=2 * step + i,
                        version=step,
                    ),
                )

            run.span("training", Span(t, t + 5, "wait", f"step {step}", step, on="rollout"))
            run.span("training", Span(t, t + 9, "phase", "train_step", step))
            run.span("training", Span(t + 6, t + 7, "phase", "audit", step))
            other.span("engine", Span(t, t + 4, "decode", "train", step, version=step - 1))
            run.metrics(step, "train", {"throughput/rollout": 100.0 * step, "timing_s/step": 10.0})

        if ends:
            run.span("training", Span(t + 10, t + 11, "phase", "record", last + 1))
            run.event("end", "the run finished", status="finished")

    return folder


def trace(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    assert main(["report", str(folder), "--trace", *arguments]) == 0
    return list(json.loads((folder / "trace.json").read_text())["traceEvents"])


def tracks(events: list[dict[str, Any]]) -> dict[str, list[tuple[str, float, float]]]:
    """The slices of each track, in seconds, by "PROCESS: TITLE"."""
    named = [event for event in events if event["ph"] == "M"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in named}

    found = defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        process, thread = (
            names[event["pid"], event["tid"], f"{kind}_name"] for kind in ("process", "thread")
        )
        found[f"{process}: {thread}"].append((event["name"], event["ts"] / 1e6, event["dur"] / 1e6))

    return found


def side_by_side(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """The kind, name, begin and length of what may overlap, in seconds."""
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    found = []
    for event in events:
        if event["ph"] == "b":
            length = (ends[event["id"]] - event["ts"]) / 1e6
            found.append((event["cat"], event["name"], event["ts"] / 1e6, length))

    return found


def test_the_steps_are_there_with_what_each_worker_did(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    found = tracks(events := trace(run, "5-6"))
    assert (
        "steps 5 to 6" in (said := capsys.readouterr().out)
        and "ui.perfetto.dev" in said
        and "trace.json" in said
    )
    assert found == {
        "worker 0: steps": [("step 5", 1050.0, 9.0), ("step 6", 1060.0, 9.0)],
        "worker 0: training": [
            *(("train_step", 1050.0, 9.0), ("audit", 1056.0, 1.0)),
            *(("train_step", 1060.0, 9.0), ("audit", 1066.0, 1.0)),
        ],
    }
    assert side_by_side(events) == [
        ("decode", "train", 1050.0, 4.0),
        ("decode", "train", 1060.0, 4.0),
        ("group", "complete", 1050.0, 4.0),
        ("group", "complete", 1051.0, 4.0),
        ("group", "complete", 1060.0, 4.0),
        ("group", "complete", 1061.0, 4.0),
        ("wait", "step 5, on rollout", 1050.0, 5.0),
        ("wait", "step 6, on rollout", 1060.0, 5.0),
    ]
    assert {event["pid"] for event in events if event.get("cat") == "decode"} == {2}
    (group,) = (event for event in events if event.get("args", {}).get("group") == 11)
    assert group["args"] == {"step": 5, "group": 11, "version": 5}
    counters = [(e["name"], e["ts"] / 1e6, *e["args"].values()) for e in events if e["ph"] == "C"]
    assert counters == [
        ("throughput/rollout", 1050.0, 500.0),
        ("throughput/rollout", 1060.0, 600.0),
    ]


def steps_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0]


def test_the_last_steps_are_the_default(tmp_path):
    run = write_run(tmp_path / "run")
    assert steps_of(trace(run)) == [f"step {step}" for step in range(4, 9)], (
        "what follows the last is no step"
    )
    assert steps_of(trace(run, "7")) == ["step 7"]


def test_a_run_that_was_killed_and_one_that_was_resumed(tmp_path):
    run = write_run(tmp_path / "run", last=5, ends=False)
    with (run / "spans" / "training.jsonl").open("a") as file:
        file.write(
            '{"t0": 1060.0, "t1": 1061.0, "kind": "phase", "what": "rollout", "step": 6}\n'
            '{"t0": 1061.0, "t1'
        )

    assert steps_of(trace(run, "5-9")) == ["step 5", "step 6"], (
        "the step that was not finished is there"
    )
    write_run(run, first=5, last=6, restart=1)
    found = tracks(trace(run, "4-6"))
    assert [name for name, *_ in found["worker 0: steps"]] == ["step 4", "step 5", "step 6"]
    assert [start for _, start, _ in found["worker 0: steps"]] == [1040.0, 1050.5, 1060.5], (
        "of the restart that counts"
    )
    assert Counter(name for name, *_ in found["worker 0: training"]) == {
        "train_step": 3,
        "audit": 3,
    }


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("12", "has the spans of steps 1 to 8, but none of 12"),
        ("3-x", "STEPS is a step such as 12, or steps such as 10-14, not '3-x'"),
        ("9-2", "such as 10-14, not '9-2'"),
    ],
)
def test_steps_that_are_none(tmp_path, capsys, steps, said):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--trace", steps]) == 2
    assert said in capsys.readouterr().err
    assert not (run / "trace.json").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["spans/training.jsonl", "events.jsonl", "metrics.jsonl"])
def test_files_that_are_none_are_named(tmp_path, capsys, file, kind):
    run = write_run(tmp_path / "runs" / "run")
    KINDS[kind](run / file)
    status = main(["report", str(run), "--trace", "6"])
    said = capsys.readouterr().err
    assert status == 2 or kind == "sparse", "the end of a long one is read"
    assert (
        status == 0 or (str(run / file) in said) == (kind != "sparse") and "Traceback" not in said
    )
