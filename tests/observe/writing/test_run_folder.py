"""The run's folder, written and read: torn lines, odd numbers, resumes, two writers, a full
disk."""

import json
import math
import os
import resource
import signal
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.observe.crash_safe_files import encode, read_object, to_json
from distflow.observe.report.build import write_report
from distflow.observe.run_reader import (
    read_damage,
    read_events,
    read_metrics,
    read_samples,
    sample_splits,
    sample_steps,
)
from distflow.observe.writing.run_folder import RunFolder, RunFolderError, Span


def steps_of(folder: Path, kind: str = "train") -> list[tuple[int, int]]:
    return [(record.step, record.restart) for record in read_metrics(folder) if record.kind == kind]


def test_metrics_come_back_under_their_flat_names(tmp_path):
    values = {
        "actor/loss": 0.5,
        "val_correct/all": 1.0,
        "val_correct/all/mean": 2.0,
        "loss": 3.0,
        'a"/é\n': 4.0,
    }
    before = time.time()
    with RunFolder(tmp_path / "run", 0) as run:
        run.metrics(7, "train", values)
    (record,) = read_metrics(tmp_path / "run")
    assert record.values == values
    assert (record.step, record.restart, record.kind) == (
        7,
        0,
        "train",
    ) and before <= record.t <= time.time()
    raw = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert set(raw) == {"step", "t", "restart", "kind", "m"} and raw["m"]["actor/loss"] == 0.5


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    with RunFolder(tmp_path / "run", 0) as run:
        run.metrics(1, "train", {"nan": math.nan, "up": math.inf, "down": -math.inf, "ok": 1.0})
        run.samples(
            1,
            [
                {
                    "response": "NaN",
                    "score": math.nan,
                    "reward_parts": {"math": math.inf, "why": "NaN?"},
                }
            ],
        )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads((tmp_path / "run" / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path / "run")
    assert math.isnan(record.values["nan"])
    assert (record.values["up"], record.values["down"], record.values["ok"]) == (
        math.inf,
        -math.inf,
        1.0,
    )
    (sample,) = read_samples(tmp_path / "run", 1)
    assert sample["response"] == "NaN", "text stays text"
    assert math.isnan(sample["score"]) and sample["reward_parts"] == {
        "math": math.inf,
        "why": "NaN?",
    }


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path):
    run = RunFolder(tmp_path / "run", 0)
    run.span(
        "worker", Span(1.0, 2.0, "busy", "rollout", step=3, group_id=4, version=5, on="engine")
    )
    run.metrics(3, "train", {"x": 1.0})
    assert steps_of(tmp_path / "run") == [(3, 0)]
    span = json.loads((tmp_path / "run" / "spans" / "worker.jsonl").read_text())
    assert span == {
        "t0": 1.0, "t1": 2.0, "kind": "busy", "what": "rollout", "restart": 0,
        "step": 3, "group_id": 4, "version": 5, "on": "engine",
    }  # fmt: skip
    run.close()
    run.close()


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_is_stepped_over_and_does_not_spoil_the_next(tmp_path, cut):
    folder = tmp_path / "run"
    with RunFolder(folder, 0) as run:
        run.metrics(1, "train", {"x": 1.0})
        run.metrics(2, "train", {"x": 2.0})

    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])

    # Only the line end is missing when one byte is cut: the record itself is whole.
    whole = [(1, 0), (2, 0)] if cut == 1 else [(1, 0)]
    assert steps_of(folder) == whole
    with RunFolder(folder, 1, resumed_at=2) as run:
        run.metrics(3, "train", {"x": 3.0})
    assert steps_of(folder) == [*whole, (3, 1)]


DAMAGE = {
    "zeros": b"\0" * 300,
    "no UTF-8": b'{"step": 2, "m": {"a": "\xff\xfe"}}',
    "half a line": b'{"step": 2, "t": 1.0, "restart": 0, "kind": "train", "m": {"a"',
    "two lines in one": b'{"step": 2, "m": {"a": 1}}{"step": 3, "m": {"a": 1}}',
    "no object": b"[1, 2]",
    "another object": b'{"kind": "train"}',
    "no step": b'{"step": "two", "m": {"a": 1}}',
    "very deep": b"[" * 100_000,
    "a number of 5,000 digits": b'{"step": 2, "m": {"a": ' + b"9" * 5000 + b"}}",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_line_in_the_middle_is_read_around_and_said(tmp_path, what):
    with RunFolder(tmp_path / "run", 0) as run:
        for step in (1, 2, 3):
            run.metrics(step, "train", {"loss": float(step)})

    for name in ("metrics.jsonl", "events.jsonl"):
        lines = (tmp_path / "run" / name).read_bytes().splitlines()
        lines[1:1] = [DAMAGE[what]]
        (tmp_path / "run" / name).write_bytes(b"\n".join(lines) + b"\n")

    assert [step for step, _ in steps_of(tmp_path / "run")] == [1, 2, 3]
    said = read_damage(tmp_path / "run")
    assert said[0] == "1 line of metrics.jsonl cannot be read: their content is missing here"
    report = write_report(tmp_path / "run").read_text()
    assert said[0] in report


def test_killed_while_writing_leaves_whole_records_only(tmp_path):
    folder = tmp_path / "run"
    pid = os.fork()
    if pid == 0:
        run = RunFolder(folder, 0)
        for step in range(10**6):
            run.metrics(step, "train", {f"m/{i}": float(i) for i in range(50)})
            run.samples(step, [{"response": "r" * 500}] * 20)

    while len(steps_of(folder)) < 20 or len(sample_steps(folder)) < 3:
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    records = read_metrics(folder)
    assert [record.step for record in records] == list(range(len(records)))
    assert all(len(record.values) == 50 for record in records)
    assert all(len(read_samples(folder, step)) == 20 for step in sample_steps(folder)[-3:])
    with RunFolder(folder, 1):
        pass  # the lock went with the process


def test_a_resume_takes_back_what_came_after_its_checkpoint(tmp_path):
    folder = tmp_path / "run"
    with RunFolder(folder, 0) as run:
        for step in range(1, 9):
            run.metrics(step, "train", {"x": 0.0})
            run.samples(step, [{"response": "old"}])
            run.event("warning", "odd", step=step)
        run.metrics(5, "val", {"v": 0.0})
        run.metrics(8, "val", {"v": 0.0})

    with RunFolder(folder, 1, resumed_at=5) as run:
        run.metrics(5, "val", {"v": 1.0})
        run.metrics(6, "train", {"x": 1.0})
        run.samples(6, [{"response": "new"}])

    assert steps_of(folder) == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1)]
    assert steps_of(folder, "val") == [(5, 1)]
    assert [len(read_samples(folder, step)) for step in range(1, 9)] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert read_samples(folder, 6)[0]["response"] == "new"
    rolled_back = [event.step for event in read_events(folder) if event.rolled_back]
    assert rolled_back == [6, 7, 8]


def test_a_second_writer_is_refused_with_what_to_do(tmp_path):
    with RunFolder(tmp_path / "run", 0):
        pid = os.fork()
        if pid == 0:
            try:
                RunFolder(tmp_path / "run", 1)
            except RunFolderError as error:
                os._exit(
                    0
                    if "another process" in str(error) and "default_local_dir" in str(error)
                    else 2
                )

            os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="/file .* in the way"):
        RunFolder(tmp_path / "file", 0)


def test_a_worker_that_outlives_its_killed_run_does_not_lock_the_folder(tmp_path):
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        run = RunFolder(tmp_path / "run", 0)
        worker = os.fork()
        if worker == 0:
            time.sleep(600)
            os._exit(0)

        os.write(write_end, str(worker).encode())
        time.sleep(600)
        run.close()

    worker = int(os.read(read_end, 20))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    try:
        RunFolder(tmp_path / "run", 1).close()
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_nobody_else_can_read_the_folder(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    with RunFolder(tmp_path / "run", 0) as run:
        run.samples(1, [{"response": "secret"}])
        run.write_json("run.json", {})

    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run" / "samples").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run" / "run.json").stat().st_mode) == 0o600


def test_a_full_disk_is_said_and_the_file_stays_readable(tmp_path):
    """A limit on the size of files stands in for the disk: the write that crosses it is cut short,
    the next fails."""
    folder = tmp_path / "run"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            run = RunFolder(folder, 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 10**9))

            try:
                for step in range(100):
                    run.metrics(step, "train", {"some/metric": 1.0})
            except OSError as error:
                named = "run's folder" in str(error) and error.filename == str(
                    folder / "metrics.jsonl"
                )
                resource.setrlimit(resource.RLIMIT_FSIZE, (10**9, 10**9))
                run.metrics(1000, "train", {"some/metric": 1.0})
                status = 0 if named else 2
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    steps = [step for step, _ in steps_of(folder)]
    assert steps == [*range(len(steps) - 1), 1000] and len(steps) > 5


def test_a_folder_without_files_reads_as_empty(tmp_path):
    assert (
        read_metrics(tmp_path) == []
        and read_events(tmp_path) == []
        and read_samples(tmp_path, 1) == []
    )
    assert read_object(tmp_path / "run.json") == {} and sample_splits(tmp_path) == []


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_everything_becomes_valid_json_that_means_the_same(value):
    assert json.loads(encode(value)) == to_json(value)


def test_numbers_that_are_no_plain_floats_are_read_beside_those_that_are(tmp_path):
    odd_values = (
        '{"a/whole": 3, "a/huge": 1e301, "a/text": "no", "a/nan": "NaN", "a/b": {"b": 1}, '
        '"c": 0.5, "%s": 1.0}'
    )
    line = '{"step": %d, "t": 1.0, "restart": 0, "kind": "train", "m": %s}\n'
    plain = '{"a/b/c": 1.5, "a/b": 2.5, "a/d": -1.0}'
    texts = [odd_values % ("n" * 201), plain, '{"a": 1.0, "b": 1e301}', '{"a": NaN}', "{}"]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(line % (i, text) for i, text in enumerate(texts))
    )
    odd, even, huge, nan, empty = (dict(record.values) for record in read_metrics(tmp_path))
    assert math.isnan(odd.pop("a/nan")) and odd == {"a/whole": 3.0, "a/huge": math.inf, "c": 0.5}
    assert (
        even == {"a/b/c": 1.5, "a/b": 2.5, "a/d": -1.0}
        and huge == {"a": 1.0, "b": math.inf}
        and empty == {}
    )
    assert math.isnan(nan["a"])
