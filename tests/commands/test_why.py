"""`distflow why`: what it prints of a run's folder, and what it says where there is nothing to
print."""

import re
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.observe.writing.run_folder import RunFolder
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.ledger import Ledger

HOSTILE = "\x1b]0;owned\x07\u202egnp\nnext"


def write_run(folder: Path) -> Path:
    """Two steps of two groups with two samples each. In the second group 2 is lost once, group 3 is
    dropped; a third step is under way."""
    with RunFolder(folder, 0) as run, Ledger(folder / "ledger.jsonl") as ledger:
        plan = DataPlan(
            num_rows=10,
            consumer_batch=2,
            group_size=2,
            total_groups=10,
            total_steps=5,
            shuffle=False,
        )
        coordinator = Coordinator(plan, ledger)

        for step in (1, 2):
            _collect(coordinator)
            numbers = coordinator.ready(step - 1)
            assert numbers is not None
            coordinator.release(step - 1)
            run.samples(step, [_sample(number, i) for number in numbers for i in range(2)])

        coordinator.issue_groups()

    return folder


def _collect(coordinator: Coordinator) -> None:
    lost = False
    while coordinator.ready(coordinator.step) is None:
        for prompt_group in coordinator.issue_groups():
            coordinator.assign({prompt_group.group_id: f"rank-{prompt_group.attempt}"})
            if prompt_group.group_id == 2 and not lost:
                lost = coordinator.retry(2)
            elif prompt_group.group_id == 3:
                coordinator.drop(3, HOSTILE)
            else:
                coordinator.complete(prompt_group.group_id, 1000 + prompt_group.group_id)


def _sample(prompt_group: int, index: int) -> dict[str, object]:
    failed = (prompt_group, index) == (4, 1)
    return {
        "uid": f"{prompt_group}-{index}",
        "response": HOSTILE,
        "score": 9.0 if failed else index * 0.5,
        "reward_parts": {"math": float("nan") if failed else float(index), HOSTILE: "no number"},
        "errors": {"math": HOSTILE} if failed else None,
    }


def why(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """(exit status, lines, standard error)"""
    status = main(["why", *arguments])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def table(lines: list[str], title: str) -> list[dict[str, str]]:
    """The rows of a table, by the names of its columns."""
    start = lines.index(title)
    head, *rows = lines[start + 1 : [*lines, ""].index("", start)]
    names = head.split("  ")
    names = [name.strip() for name in names if name.strip()]
    cells = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]
    return [dict(zip(names, row, strict=False)) for row in cells]


def test_groups_retries_drops_and_rewards(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run")
    status, lines, err = why(capsys, str(run_dir), "2")
    assert (status, err) == (0, "")
    assert lines[0] == f"step 2 of {run_dir}: 2 groups, 2,006 tokens, staleness at most 0"
    assert lines[1].startswith("consumed 20") and lines[1].endswith(
        "by restart 0; it made version 2 of the weights"
    )
    last = (
        r"the last group to be done was ([24]), \S+ s after its start; its longest response is \1-0"
    )
    assert re.fullmatch(last, lines[2])
    start = lines.index("groups")
    head = "group epoch row version stale worker attempts tokens samples reward errors score"
    assert " ".join(lines[start + 1].split()) == head
    lost, failed = lines[start + 2 : start + 4]
    assert lost.split()[:10] == ["2", "0", "2", "1", "0", "rank-1", "2", "1,002", "2", "0.250"]
    assert failed.split()[:10] == ["4", "0", "4", "1", "0", "rank-0", "1,004", "2", "1", "0.000"], (
        "9 is no score"
    )
    (dropped,) = table(lines, "dropped meanwhile: 1 \\x1b]0;owned\\x07\\u202egnp⏎next")
    assert (dropped["group"], dropped["row"], dropped["worker"]) == ("3", "3", "rank-0")
    assert dropped["reason"] == "\\x1b]0;owned\\x07\\u202egnp⏎next"


def test_columns_that_say_nothing_are_left_out(tmp_path, capsys):
    _, lines, _ = why(capsys, str(write_run(tmp_path)), "1")
    assert "attempts" not in lines[lines.index("groups") + 1]
    assert "dropped meanwhile: none" in lines


def test_the_step_that_a_killed_run_left(tmp_path, capsys):
    _, lines, _ = why(capsys, str(write_run(tmp_path)), "3")
    assert "step 3 of" in lines[0]
    assert lines[0].endswith(
        "is not finished; states of its groups at the end of the ledger: 2 generating"
    )
    assert [row["state"] for row in table(lines, "groups")] == ["generating", "generating"]


def test_the_newest_run_of_the_folder_is_meant(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = why(capsys, "1")
    assert status == 2 and "name the run's folder" in err
    write_run(tmp_path / "runs" / "math" / "old")
    new = write_run(tmp_path / "runs" / "math" / "new")
    (new / "ledger.jsonl").touch()
    _, lines, _ = why(capsys, "1")
    assert lines[0].startswith("step 1 of runs/math/new:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "name a step of run,"),
        (("run", "9"), "no step 9: it has steps 1 to 2"),
        (("no/such/run", "1"), "there is no folder no/such/run"),
        (("empty", "1"), "empty is not a run's folder: it has no file events.jsonl"),
        ((".", "1"), "is not a run's folder, but contains runs: name run, for example"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    status, lines, err = why(capsys, *arguments)
    assert (status, lines) == (2, []) and err.startswith("distflow: ") and words in err
