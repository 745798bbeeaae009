"""The idle invoice of journals whose answer is known: every second of a device is charged once."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from distflow.cli import main
from distflow.observe.report.doctor import examine, read_charges
from distflow.observe.report.doctor_run_rules import RunRecords
from distflow.observe.report.idle_invoice import (
    Charge,
    Journal,
    charges,
    invoice_json,
    invoice_lines,
    shares,
)
from distflow.observe.run_reader import Group
from distflow.observe.writing.run_folder import RunFolder, Span

Spans = dict[str, list[Span]]


def wait(start: float, end: float, what: str, on: str, group_id: int | None = None) -> Span:
    return Span(start, end, "wait", what, on=on, group_id=group_id)


def phase(start: float, end: float, what: str) -> Span:
    return Span(start, end, "phase", what)


def group(start: float, end: float, group_id: int) -> Span:
    return Span(start, end, "group", "complete", group_id=group_id)


def draws(start: float, end: float, lane: str = "train") -> Span:
    return Span(start, end, "decode", lane)


def journal(
    spans: Spans, end: float, ended: Mapping[int, float] | None = None, groups: Sequence[Group] = ()
) -> Journal:
    return Journal(spans, groups, ended or {1: end}, [(0.0, end)])


def by_cause(found: Sequence[Charge], **where: int | None) -> dict[str, float]:
    """Seconds by kind and cause."""
    chosen = [
        each for each in found if all(getattr(each, name) == value for name, value in where.items())
    ]
    return {
        f"{kind}: {cause}": round(seconds, 6)
        for kind, causes in shares(chosen).items()
        for cause, seconds in causes.items()
        if seconds
    }


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
            wait(0, 0.5, "capacity", "training"),
            group(0.5, 5, 1),
            group(0.5, 9.25, 2),
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


def test_an_idle_second_is_charged_to_the_end_of_the_chain_of_waits() -> None:
    found = charges(journal(one_device(), 19, groups=[Group(1, step=1), Group(2, step=1)]))
    assert by_cause(found) == {
        "busy: train_step": 5.0,
        "busy: generate": 3.0,
        "overhead: update_weights": 2.0,
        "overhead: rollout": 1.0,
        "overhead: audit": 1.0,
        "overhead: record": 1.0,
        "overhead: wake-up": 0.25,
        "idle: reward": 5.0,
        "idle: generate": 0.5,  # the engine has the request, and draws nothing yet
        "idle: rollout nodes": 0.25,
    }


def test_a_group_with_a_domain_names_it_and_a_dropped_one_holds_up_the_step_too() -> None:
    known = [Group(1, step=1, domain="math"), Group(2, "dropped", domain="code")]
    idle = by_cause(charges(journal(one_device(), 19, groups=known)), kind="idle")  # type: ignore[arg-type]
    # Until group 1 ends, the step waits for it; then for the group whose place nobody else takes.
    assert idle["idle: reward (math)"] == 1.0 and idle["idle: reward (code)"] == 4.0


def test_a_worker_that_only_generates_waits_for_the_trainer_and_the_trainer_for_its_slowest_group() -> (  # noqa: E501
    None
):
    spans: Spans = {
        "training": [
            phase(0, 8, "rollout"),
            wait(0, 8, "step 1", "rollout"),
            phase(8, 16, "train_step"),
            phase(16, 18, "update_weights"),
            phase(18, 20, "eval"),
        ],
        "rollout-1": [
            group(0, 4, 1),
            wait(0, 4, "responses", "rollout engine", 1),
            wait(4, 20, "capacity", "coordinator"),
        ],
        "rollout-2": [
            group(0, 8, 2),
            wait(0, 8, "responses", "rollout engine", 2),
            wait(8, 20, "capacity", "coordinator"),
        ],
        "engine-1": [draws(0, 4), wait(17, 18, "weights of step 1", "training")],
        "engine-2": [
            draws(0, 8),
            wait(17, 18, "weights of step 1", "training"),
            draws(18, 20, "eval"),
        ],
    }
    found = charges(journal(spans, 20, groups=[Group(1, step=1), Group(2, step=1)]))
    assert by_cause(found, device=0) == {
        "busy: train_step": 8.0,
        "overhead: update_weights": 2.0,
        "overhead: eval": 2.0,
        "idle: generate": 8.0,
    }
    assert by_cause(found, device=1) == {
        "busy: generate": 4.0,
        "overhead: update_weights": 1.0,
        "idle: trainer: train_step": 8.0,
        "idle: generate": 4.0,
        "idle: trainer: eval": 2.0,
        "idle: trainer: update_weights": 1.0,
    }
    assert by_cause(found, device=2) == {
        "busy: generate": 8.0,
        "overhead: eval": 2.0,
        "overhead: update_weights": 1.0,
        "idle: trainer: train_step": 8.0,
        "idle: trainer: update_weights": 1.0,
    }


def test_ranks_wait_for_the_one_that_computes_and_exchange_data_when_all_have_come() -> None:
    spans: Spans = {
        "training": [
            phase(0, 10, "train_step"),
            wait(2, 9, "a collective", "other ranks"),
            phase(10, 11, "record"),
        ],
        "training-1": [
            phase(0, 10, "train_step"),
            wait(8, 9, "a collective", "other ranks"),
            phase(10, 11, "record"),
        ],
        "training-2": [
            phase(0, 5, "slow_node"),
            phase(5, 10, "train_step"),
            wait(6, 9, "a collective", "other ranks"),
        ],
    }
    found = charges(journal(spans, 11))
    assert by_cause(found, device=0) == {
        "busy: train_step": 3.0,
        "overhead: communication": 1.0,
        "overhead: record": 1.0,
        "idle: rank 1: train_step": 6.0,
    }
    assert by_cause(found, device=2)["overhead: end"] == 1.0
    assert sum(each.seconds for each in found) == pytest.approx(33)


@pytest.mark.parametrize(
    ("seconds", "kind", "cause"), [(0.4, "overhead", "wake-up"), (30.0, "idle", "stuck")]
)
def test_a_cycle_of_waits_is_stuck_unless_it_ends_at_once(
    seconds: float, kind: str, cause: str
) -> None:
    end = 1 + seconds
    spans: Spans = {
        "training": [phase(0, 1, "train_step"), wait(1, end, "step 2", "rollout")],
        "rollout": [wait(0, end, "capacity", "training")],
        "engine": [draws(0, 0.1)],
    }
    assert by_cause(charges(journal(spans, end))) == {
        "busy: train_step": 1.0,
        f"{kind}: {cause}": pytest.approx(seconds),
    }


def test_a_tool_a_round_and_the_loader_are_named() -> None:
    spans: Spans = {
        "training": [wait(0, 12, "step 1", "rollout")],
        "rollout": [
            wait(0, 2, "rows", "data"),
            group(2, 12, 1),
            group(2, 11, 2),
            wait(2, 4, "responses", "rollout engine", 1),
            wait(2, 4, "responses", "rollout engine", 2),
            wait(4, 9, "a round of requests", "other groups", 1),
            wait(4, 8.5, "tool search", "tool search", 2),
            wait(8.5, 9, "environment", "environment", 2),
            wait(9, 11, "responses", "rollout engine", 1),
            wait(9, 11, "responses", "rollout engine", 2),
        ],
        "engine": [draws(2, 4), draws(9, 11)],
    }
    found = charges(journal(spans, 12, groups=[Group(1, step=1), Group(2, step=1)]))
    assert by_cause(found) == {
        "busy: generate": 4.0,
        "idle: tool search": 4.5,
        "idle: data loader": 2.0,
        "idle: rollout nodes": 1.0,
        "idle: environment": 0.5,
    }


def test_the_last_tenth_of_the_groups_is_a_long_tail() -> None:
    spans: Spans = {
        "training": [wait(0, 10, "step 1", "rollout")],
        "rollout-1": [
            each
            for i in range(10)
            for each in (
                group(0, 10 if i == 9 else 4, i),
                wait(0, 10 if i == 9 else 4, "responses", "rollout engine", i),
            )
        ],
        "engine-1": [draws(0, 10)],
    }
    found = charges(journal(spans, 10, groups=[Group(i, step=1) for i in range(10)]))
    assert by_cause(found, device=0) == {"idle: long tail": 6.0, "idle: generate": 4.0}


def test_a_device_without_a_span_is_unknown_until_spans_come_again_and_lost_if_steps_go_on_without_it() -> (  # noqa: E501
    None
):
    trained = [phase(float(t), t + 1.0, "train_step") for t in range(10)]
    spans: Spans = {
        "training": trained[:4] + trained[6:],
        "training-1": trained[:2],
        "engine": [],
    }
    found = charges(
        Journal(spans, (), {step: float(step) for step in range(1, 11)}, [(-1.0, 11.0)])
    )
    assert by_cause(found, device=0) == {
        "busy: train_step": 8.0,
        "overhead: start": 1.0,
        "overhead: end": 1.0,
        "unknown: unknown": 2.0,
    }
    assert by_cause(found, device=1) == {
        "busy: train_step": 2.0,
        "overhead: start": 1.0,
        "down: no worker": 9.0,
    }
    assert by_cause(found, step=5) == {"down: no worker": 1.0, "unknown: unknown": 1.0}
    assert by_cause(found, step=None) == {"overhead: end": 1.0, "down: no worker": 1.0}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_spans_are_each_second_is_charged_once(seed: int) -> None:
    random = Random(seed)
    kinds = ("phase", "wait", "group", "decode")
    whats = (
        "step 1",
        "rollout",
        "train_step",
        "weights of step 2",
        "train",
        "eval",
        "complete",
        "capacity",
        "",
    )
    on = (
        None,
        "rollout",
        "training",
        "other ranks",
        "coordinator",
        "rollout engine",
        "reward functions",
        "data",
        "other groups",
    )

    def span() -> Span:
        start = random.uniform(0, 100)
        end = start + random.choice((0.0, 0.1, 3.0, 40.0))
        number = random.choice((None, 1, 2, 3))
        return Span(
            start, end, random.choice(kinds), random.choice(whats), 1, number, 0, random.choice(on)
        )

    names = (
        "training",
        "training-1",
        "rollout",
        "rollout-2",
        "engine",
        "engine-2",
        "reward",
        "odd-name",
    )
    spans = {name: [span() for _ in range(60)] for name in names}
    # its clock was set back at times
    ended = {step: random.uniform(0, 140) for step in range(1, 6)}
    windows = [(0.0, 50.0), (60.0, 90.0), (80.0, 85.0), (100.0, 140.0)]
    found = charges(Journal(spans, [Group(1, step=1), Group(2, step=3)], ended, windows))
    assert all(each.seconds >= 0 for each in found)
    assert {each.device for each in found} == {0, 1, 2}
    for device in range(3):
        assert sum(each.seconds for each in found if each.device == device) == pytest.approx(140)
    assert by_cause(found, device=0)["down: restart"] == 20.0


def write_run(
    folder: Path,
    restart: int,
    steps: range,
    begin: float,
    status: str,
    resumed_at: int | None = None,
) -> None:
    """Steps of ten seconds: half of each waits for a score."""
    with RunFolder(folder, restart, resumed_at) as run:
        run.write_json("run.json", {})
        run.write_text("config.yaml", "cost: {gpu_hour: 3.6}\n")
        for place, step in enumerate(steps):
            t = begin + 10 * place
            run.span("training", Span(t, t + 6, "wait", f"step {step}", step, on="rollout"))
            run.span("training", Span(t + 6, t + 10, "phase", "train_step", step))
            run.span("engine", Span(t, t + 1, "decode", "train", step))
            run.span("rollout", Span(t, t + 6, "group", "complete", step, step))
            run.span(
                "reward", Span(t + 1, t + 6, "wait", "scores", step, step, on="reward functions")
            )
    with (folder / "metrics.jsonl").open("a") as file:
        for place, step in enumerate(steps):
            record = {
                "step": step,
                "t": begin + 10 * place + 10,
                "restart": restart,
                "kind": "train",
            }
            file.write(json.dumps({**record, "m": {"timing_s": {"step": 10}}}) + "\n")
    where = "" if resumed_at is None else f', "resumed_at": {resumed_at}'
    kept = [
        line
        for line in (folder / "events.jsonl").read_text().splitlines()
        if f'"restart": {restart}' not in line and f'"restart":{restart}' not in line
    ]
    kept.append(f'{{"t": {begin}, "restart": {restart}, "kind": "start", "message": ""{where}}}')
    if status:
        end = begin + 10 * len(steps)
        kept.append(
            f'{{"t": {end}, "restart": {restart}, "kind": "end", "message": "", "status": '
            f'"{status}"}}'
        )
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in kept))


def test_what_a_restart_threw_away_and_the_time_until_it_are_down(tmp_path: Path) -> None:
    # until 1050; steps 3 to 5 are lost
    write_run(tmp_path / "run", 0, range(1, 6), 1000.0, "failed")
    write_run(tmp_path / "run", 1, range(3, 7), 1070.0, "finished", resumed_at=2)
    found = read_charges(tmp_path / "run")
    assert by_cause(found) == {
        "busy: train_step": 24.0,
        "busy: generate": 6.0,
        "idle: reward": 30.0,
        "down: restart": 50.0,
    }
    assert by_cause(found, step=3)["down: restart"] == 50.0
    assert sum(each.seconds for each in found) == pytest.approx(110)
    assert by_cause(read_charges(tmp_path / "run", 3)) == by_cause(found, step=3)


def test_torn_files_and_a_killed_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0, range(1, 5), 1000.0, "")
    whole = by_cause(read_charges(tmp_path / "run"))
    for name in ("training", "engine", "rollout"):
        path = tmp_path / "run" / "spans" / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[:-20] + b"\n{\xff}\n")
        found = read_charges(tmp_path / "run")
        assert sum(each.seconds for each in found) == pytest.approx(40)
        if name == "training":
            torn = by_cause(found)
    assert (
        torn["unknown: unknown"] == whole["busy: train_step"] / 4
        and torn["busy: train_step"] == 12.0
    )
    (tmp_path / "run" / "spans" / "training.jsonl").unlink()
    assert sum(each.seconds for each in read_charges(tmp_path / "run")) == pytest.approx(40)


def test_unknown_time_is_found(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 0, range(1, 13), 1000.0, "finished")
    for name in ("engine", "rollout", "reward"):
        (tmp_path / "run" / "spans" / f"{name}.jsonl").unlink()
    run = RunRecords(tmp_path / "run")
    assert by_cause(run.charges)["unknown: unknown"] == 72.0
    assert "unaccounted-time" in {each.rule for each in examine(run).findings}


def test_a_short_gap_is_the_work_between_phases_and_a_long_one_is_unknown() -> None:
    spans: Spans = {
        "training": [
            phase(0, 1, "train_step"),
            phase(1.05, 2, "train_step"),
            phase(2.2, 3, "train_step"),
        ],
        "engine": [],
    }
    assert by_cause(charges(journal(spans, 3))) == {
        "busy: train_step": 2.75,
        "overhead: between phases": 0.05,
        "unknown: unknown": 0.2,
    }


def test_why_and_the_report_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", 0, range(1, 13), 1000.0, "finished")
    (tmp_path / "run" / "ledger.jsonl").write_text(
        "".join(
            f'{{"t": 1, "restart": 0, "kind": "issued", "group_id": {i}}}\n' for i in range(1, 3)
        )
        + '{"t": 2, "restart": 0, "kind": "consumed", "step": 1, "group_ids": [1, 2]}\n'
    )
    found = read_charges(tmp_path / "run", 2)
    assert invoice_lines(found, 7200) == [
        "time      in % of 1 device x 10.0 s",
        "          busy 50.0: train_step 40.0, generate 10.0",
        "idle      50.0, waiting for reward 50.0 | unknown 0.0",
        "costs     20.00, of it 10.00 idle (cost.gpu_hour=7200)",
    ]
    data = invoice_json(read_charges(tmp_path / "run"))
    assert (data["devices"], data["seconds"], len(data["steps"])) == (1, pytest.approx(120), 12)  # type: ignore[arg-type]
    rule = next(
        each
        for each in examine(RunRecords(tmp_path / "run")).problems()
        if each.rule == "starving-trainer"
    )
    assert (
        rule.text == "Devices waited for reward 50% of the time of the last 12 steps."
        and "num_workers" in rule.advice
    )
    assert main(["report", str(tmp_path / "run")]) == 0
    assert '"cause":"reward"' in (tmp_path / "run" / "report.html").read_text().replace(
        '": "', '":"'
    )
