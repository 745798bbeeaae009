"""Times of steps whose answer is known."""

import json
from pathlib import Path
from random import Random

import pytest

from distflow.cli import main
from distflow.observe.findings.doctor import examine
from distflow.observe.report.activity import RunActivity, read_activity
from distflow.observe.report.step_times import StepTimes, step_times, times_json, times_lines
from distflow.observe.run_reader import MetricsRecord
from distflow.observe.run_records import RunRecords
from distflow.observe.writing.run_folder import RunFolder, Span

Spans = dict[str, list[Span]]


def wait(start: float, end: float, what: str, on: str, group_id: int | None = None) -> Span:
    return Span(start, end, "wait", what, on=on, group_id=group_id)


def phase(start: float, end: float, what: str) -> Span:
    return Span(start, end, "phase", what)


def draws(start: float, end: float, lane: str = "train") -> Span:
    return Span(start, end, "decode", lane)


def times_of(spans: Spans, *ends: float) -> StepTimes:
    """ends: of the steps."""
    records = [MetricsRecord(step, t, 0, "train", {}) for step, t in enumerate(ends, 1)]
    return step_times(RunActivity(spans, frozenset()), records)


def one_device() -> Spans:
    """A step in which the last group to end waits for its score."""
    return {
        "training": [
            phase(0, 10, "rollout"),
            wait(0.5, 9.5, "step 1", "rollout"),
            phase(10, 16, "train_step"),
            phase(12, 13, "audit"),
            phase(16, 18, "update_weights"),
            wait(16.5, 17.5, "weights of step 1", "rollout engine"),
            phase(18, 19, "record"),
        ],
        "rollout": [
            wait(0.5, 3, "responses", "rollout engine", 1),
            wait(0.5, 4, "responses", "rollout engine", 2),
            wait(9.25, 19, "capacity", "training"),
        ],
        "engine": [draws(1, 4), wait(16.5, 17.5, "weights of step 1", "training")],
        "reward": [
            wait(3, 5, "scores", "reward functions", 1),
            wait(4, 9, "scores", "reward functions", 2),
        ],
    }


def test_phases_and_waits_of_the_training_loop_add_up_to_the_step():
    times = times_of(one_device(), 19)
    found = {(p.phase, p.waits_for): p.seconds for p in times.parts if p.actor == "training"}
    assert found == {
        ("rollout", ""): 1.0,
        ("rollout", "rollout"): 9.0,
        ("train_step", ""): 5.0,
        ("audit", ""): 1.0,
        ("update_weights", ""): 1.0,
        ("update_weights", "rollout engine"): 1.0,
        ("record", ""): 1.0,
    }
    assert sum(found.values()) == 19


def test_waits_count_once_while_several_groups_wait():
    waits = times_of(one_device(), 19).waits()
    assert waits["rollout", "rollout engine"] == 3.5
    assert waits["reward", "reward functions"] == 6.0
    assert next(iter(waits)) == ("rollout", "training")


def test_a_worker_is_idle_while_it_neither_trains_nor_draws_nor_loads_weights():
    times = times_of(one_device(), 19)
    assert times.workers == 1

    # From 0.5 to 9.5 the loop waits, and the engine draws from 1 to 4.
    assert times.idle == {1: 6.0}
    assert times.idle_causes == {
        (1, "rollout engine"): 0.5,
        (1, "reward functions"): 5.0,
        (1, "training"): 0.25,
    }
    assert times.idle_share() == pytest.approx(6 / 19)


def test_a_server_that_logs_no_decoding_works_while_it_has_a_request():
    spans: Spans = {
        "training": [phase(0, 10, "rollout"), wait(0, 10, "step 1", "rollout")],
        "rollout": [wait(2, 6, "responses", "rollout engine", 1)],
    }
    assert times_of(spans, 10).idle == {1: 6.0}


def test_a_step_begins_where_the_one_before_ended_and_after_a_restart_with_its_first_span():
    spans: Spans = {
        "training": [
            phase(0, 10, "train_step"),
            Span(50, 55, "phase", "train_step", restart=1),
        ]
    }
    records = [
        MetricsRecord(1, 4.0, 0, "train", {}),
        MetricsRecord(1, 4.0, 0, "val", {}),
        MetricsRecord(2, 55.0, 1, "train", {}),
    ]
    times = step_times(RunActivity(spans, frozenset()), records)
    assert times.windows == {1: (0, 4.0), 2: (50, 55.0)}
    assert {(part.step, part.seconds) for part in times.parts} == {(1, 4.0), (2, 5.0)}


def test_a_step_of_which_spans_are_missing_is_left_out():
    spans: Spans = {"training": [phase(5, 10, "train_step"), phase(10, 15, "train_step")]}
    records = [MetricsRecord(step, 5.0 * step, 0, "train", {}) for step in (1, 2, 3)]
    times = step_times(RunActivity(spans, frozenset({"training"})), records)
    assert list(times.windows) == [2, 3]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_spans_are_no_second_of_a_loop_counts_twice(seed):
    random = Random(seed)

    def span() -> Span:
        start = random.uniform(0, 100)
        end = start + random.choice((0.0, 0.1, 3.0, 40.0))
        kind = random.choice(("phase", "wait", "group", "decode"))
        on = random.choice((None, "rollout", "training", "other ranks", "rollout engine"))
        return Span(start, end, kind, random.choice(("step 1", "train", "")), 1, 1, 0, on)

    names = ("training", "training-1", "rollout", "rollout-2", "engine", "reward", "odd-name")
    ends = [random.uniform(0, 140) for _ in range(5)]  # the clock was set back at times

    times = times_of({name: [span() for _ in range(60)] for name in names}, *ends)
    for step, (start, end) in times.windows.items():
        for actor in ("training", "training-1"):
            own = [p.seconds for p in times.parts if (p.step, p.actor) == (step, actor)]
            assert sum(own) <= end - start + 1e-9
        assert -1e-9 <= times.idle.get(step, 0.0) <= times.seconds([step]) + 1e-9


def write_run(folder: Path, steps: range) -> None:
    """Steps of ten seconds: five of each are idle, and wait for a score."""
    with RunFolder(folder, 0) as run:
        run.write_json("run.json", {})
        for place, step in enumerate(steps):
            t = 1000.0 + 10 * place
            run.span("training", Span(t, t + 6, "phase", "rollout", step))
            run.span("training", Span(t, t + 6, "wait", f"step {step}", step, on="rollout"))
            run.span("training", Span(t + 6, t + 10, "phase", "train_step", step))
            run.span("engine", Span(t, t + 1, "decode", "train", step))
            run.span(
                "reward", Span(t + 1, t + 6, "wait", "scores", step, step, on="reward functions")
            )

    with (folder / "metrics.jsonl").open("a") as file:
        for place, step in enumerate(steps):
            t = 1010.0 + 10 * place
            record = {"step": step, "t": t, "restart": 0, "kind": "train"}
            file.write(json.dumps({**record, "m": {"timing_s/step": 10}}) + "\n")


def test_lines_page_and_finding_of_a_run(tmp_path):
    write_run(tmp_path / "run", range(1, 13))
    run = RunRecords(tmp_path / "run")
    assert times_lines(run.times, 2) == [
        "time      10.00 s: train_step 4.00",
        "waits     training for rollout 6.00, reward for reward functions 5.00",
        "idle      50% of 1 worker",
    ]
    assert times_lines(run.times, 13) == []
    data = times_json(run.times)
    assert (data["workers"], data["seconds"], data["idle"]) == (1, 120, 60)
    assert data["parts"] == [
        {"phase": "rollout", "waits_for": "rollout"},
        {"phase": "train_step", "waits_for": ""},
    ]
    assert data["bars"][2] == {"steps": "3", "seconds": {0: 6, 1: 4}}
    (rule,) = [each for each in examine(run).problems() if each.rule == "idle-workers"]
    assert "50% of the time of the last 12 steps" in rule.text
    assert "reward functions 50%" in rule.text
    assert "num_workers" in rule.advice


def test_of_many_steps_the_last_have_bars():
    spans: Spans = {"training": [phase(float(t), t + 1.0, "train_step") for t in range(401)]}
    bars = times_json(times_of(spans, *map(float, range(1, 402))))["bars"]
    assert [bars[0]["steps"], bars[-1]["steps"]] == ["202", "401"]
    assert sum(bar["seconds"][0] for bar in bars) == 200


def test_the_report_shows_who_waits_for_whom(tmp_path):
    write_run(tmp_path / "run", range(1, 13))
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text().replace('": ', '":')
    assert '"waits for":"reward functions"' in page.replace(': "', ':"')


def test_a_file_of_spans_that_leads_nowhere_has_none(tmp_path):
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans/training.jsonl").symlink_to(tmp_path / "missing")
    assert read_activity(tmp_path) == RunActivity({}, frozenset())
