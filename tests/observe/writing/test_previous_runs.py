"""A run that is set aside is whole in its own folder, wherever a kill came, and nothing of
somebody's moves."""

import os
from pathlib import Path

import pytest

from distflow.observe.writing.run_folder import MARK, claimed, finish_moving, is_ours, set_aside

RUN = (
    "metrics.jsonl",
    "events.jsonl",
    "ledger.jsonl",
    "report.html",
    "checkpoints/step-000001/w",
    "samples/1.parquet",
)


def write_run(folder: Path, names: tuple[str, ...] = RUN) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name[0] != "."
    }


def test_a_run_moves_whole_and_what_is_somebody_s_or_shared_stays(tmp_path):
    run = tmp_path / "run"
    with claimed(run):
        write_run(run, (*RUN, "notes.txt", "data/train.arrow", "models/step-000009/config.json"))
        moved = set_aside(run)

    assert moved == run / "earlier" / "1"
    assert files(moved) == set(RUN) and (moved / MARK).is_file() and is_ours(moved)
    assert files(run) - {f"earlier/1/{name}" for name in RUN} == {
        "notes.txt",
        "data/train.arrow",
        "models/step-000009/config.json",
    }


def test_each_run_gets_a_folder_of_its_own_and_an_unused_folder_none(tmp_path):
    with claimed(tmp_path):
        assert set_aside(tmp_path) is None
        for number in (1, 2, 3):
            write_run(tmp_path, ("metrics.jsonl", "events.jsonl"))
            (tmp_path / "metrics.jsonl").write_text(str(number))
            assert set_aside(tmp_path) == tmp_path / "earlier" / str(number)

    assert [(tmp_path / "earlier" / n / "metrics.jsonl").read_text() for n in "123"] == [
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize("survived", range(6))
def test_what_a_kill_left_half_moved_follows_at_the_next_start(tmp_path, monkeypatch, survived):
    write_run(tmp_path)
    rename, done = os.rename, list[str]()

    def killed(source: Path, target: Path) -> None:
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append(str(target))
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", killed)
        set_aside(tmp_path)

    finish_moving(tmp_path)
    assert files(tmp_path) == {f"earlier/1/{name}" for name in RUN}
    finish_moving(tmp_path)
    assert files(tmp_path) == {f"earlier/1/{name}" for name in RUN}


def test_a_whole_run_is_left_where_it_is_by_a_start_that_finds_nothing_half_moved(tmp_path):
    write_run(tmp_path)
    finish_moving(tmp_path)
    assert files(tmp_path) == set(RUN)
