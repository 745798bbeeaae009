"""Views of DuckDB over the folders of runs: what each holds, also of damaged files."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.errors import UserError
from distflow.launch.run_folders.sql_views import VIEWS, write_views
from distflow.observe.sample_files import COLUMNS
from distflow.observe.writing.run_folder import RunFolder
from tests.commands.test_why import write_run as write_ledger_run
from tests.observe.conftest import HOSTILE, write_run

duckdb = pytest.importorskip("duckdb", reason="the extra `ui`")

Ask = Callable[[str], list[Any]]


def opened(file: Path) -> Ask:
    """As anyone's DuckDB does."""
    connection = duckdb.connect()
    connection.execute(file.read_text("utf-8"))
    return lambda query: list(connection.execute(query).fetchall())


def views_of(run_dir: Path, *more: Path) -> Ask:
    file = run_dir.parent / "views.sql"
    assert write_views([run_dir, *more], file) == []
    return opened(file)


def test_the_command_writes_them_and_says_how_to_open_them(tmp_path, capsys):
    first = write_run(tmp_path / "a" / "run's [1]*")
    second = write_run(tmp_path / "b", num_steps=3)
    file = tmp_path / "it's [2]?" / "views.sql"
    file.parent.mkdir()
    assert main(["report", str(first), str(second), "--views", str(file)]) == 0
    assert "duckdb -init" in capsys.readouterr().out
    ask = opened(file)
    assert ask("select run, max(step) from metrics group by run order by 2") == [
        ("b", 3),
        ("run's [1]*", 12),
    ]
    assert ask("select run, count(*) > 0 from samples group by run order by 1") == [
        ("b", True),
        ("run's [1]*", True),
    ]
    assert main(["report", str(first), "--views", str(tmp_path / "none" / "x.sql")]) == 2
    assert "none/x.sql cannot be written" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--views", str(file)]) == 2


def test_every_view_has_its_columns_also_of_a_run_without_files(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=2)
    with RunFolder(tmp_path / "new", 0):
        pass

    for ask in (views_of(run_dir), views_of(tmp_path / "new")):
        for view, columns in VIEWS.items():
            kinds = {name: kind for name, kind, *_ in ask(f"describe {view}")}
            listed = dict(column.split() for column in columns.split(", "))
            assert kinds == {"run": "VARCHAR", **listed}, view

    assert ask("select count(*) from samples") == [(0,)]
    assert [*kinds] and list(COLUMNS) == VIEWS["samples"].replace(",", "").split()[::2]


def test_metrics_have_a_row_for_each_value_also_of_a_late_metric(tmp_path):
    run_dir = write_run(tmp_path / "run")
    with RunFolder(run_dir, 0) as run:
        run.metrics(900, "train", {'late/"quoted"': 3.0, "late/nan": math.nan})
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 901, "t": 1, "restart": 0, "kind": "train", "m": {"torn')
    ask = views_of(run_dir)
    assert ask("select step, value from metrics where key = 'late/\"quoted\"'") == [(900, 3.0)]
    assert ask("select count(*), min(step) from metrics where isnan(value)") == [(2, 3)]
    assert ask("select step from metrics where isinf(value)") == [(5,)]
    assert ask("select max(step) from metrics") == [(900,)]


def test_samples_are_whole_also_those_that_utf8_cannot_hold(tmp_path):
    run_dir = write_run(tmp_path / "run")
    ask = views_of(run_dir)
    query = "select response, score, advantage from samples where step = 2 and split = 'train'"
    found = ask(query + " order by response_length")
    leaking = [text.replace("LEAK", "http://127.0.0.1:1/leak") for text in HOSTILE]
    assert [row[0] for row in found][: len(HOSTILE)] == [
        text.replace("\ud800", "\\ud800") for text in leaking
    ]
    assert found[5][1] == 1.0 and math.isnan(found[4][2])
    assert ask("select count(*) from samples where split = 'val'") == [(40,)]
    assert ask("select errors->>0 from samples where step = 1 and uid = '100-3'") == [
        ("math: out of time",)
    ]
    assert ask("select max((reward_parts->>'the answer is 15')::double) from samples") == [(1.0,)]


def test_torn_files_rolled_back_steps_and_links_out_of_the_folder_are_left_out(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=4)
    whole = (run_dir / "samples" / "000002.parquet").read_bytes()
    (run_dir / "samples" / "000008.parquet").write_bytes(whole[:-1])
    (tmp_path / "secret.parquet").write_bytes(whole)
    (run_dir / "samples" / "000009.parquet").symlink_to(tmp_path / "secret.parquet")
    with RunFolder(run_dir, 1, resumed_at=2) as run:
        run.samples(3, [{"uid": "0-0", "response": "again"}])
    file = tmp_path / "views.sql"
    assert write_views([run_dir], file) == [
        f"{run_dir}/samples/000008.parquet is damaged: its samples are missing here"
    ]
    counts = opened(file)(
        "select step, count(*) from samples where split = 'train' group by all order by all"
    )
    assert counts == [(1, 16), (2, 16), (3, 1)]


def test_groups_come_from_the_ledger(tmp_path):
    run_dir = write_ledger_run(tmp_path / "run")
    ask = views_of(run_dir)
    query = "select group_id, state, step, attempts, tokens, worker from groups where group_id < 4"
    assert ask(query + " order by 1") == [
        (0, "trained", 1, 1, 1000, "rank-0"),
        (1, "trained", 1, 1, 1001, "rank-0"),
        (2, "trained", 2, 2, 1002, "rank-1"),
        (3, "dropped", None, 1, None, "rank-0"),
    ]
    assert ask("select reason from groups where group_id = 3") == [
        ("\x1b]0;owned\x07\u202egnp\nnext",)
    ]


def test_a_folder_is_no_file_of_views(tmp_path):
    for folder in (tmp_path, Path("/")):
        with pytest.raises(UserError, match=f"{folder}.* folder"):
            write_views([], folder)
