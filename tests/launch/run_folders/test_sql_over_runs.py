"""SQL over the folders of runs: what each view holds, what damaged and hostile files do, and what
is refused."""

import datetime
import hashlib
import json
import math
import multiprocessing
import resource
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from distflow.cli import COMMANDS, main
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.launch.run_folders.sql_over_runs import QUESTIONS, VIEWS, query_runs
from distflow.observe.sample_files import COLUMNS
from distflow.observe.writing.run_folder import RunFolder
from distflow.runtime.run_recorder import keep_groups
from tests.commands.test_export_replay_report_why import write_run as write_ledger_run
from tests.observe.conftest import HOSTILE, write_run

pytest.importorskip("duckdb", reason="the extra `ui`")


def rows(run_dir: Path, query: str) -> list[tuple[object, ...]]:
    return query_runs([run_dir], query).rows


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_metrics_have_a_row_for_each_value_also_of_a_late_metric(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    with RunFolder(run_dir, 0) as run:
        run.metrics(900, "train", {'late/"quoted"': 3.0, "late/nan": math.nan})
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 901, "t": 1, "restart": 0, "kind": "train", "m": {"torn')
    assert rows(run_dir, "select step, value from metrics where key = 'late/\"quoted\"'") == [
        (900, 3.0)
    ]
    assert rows(run_dir, "select count(*), min(step) from metrics where isnan(value)") == [(2, 3)]
    assert rows(run_dir, "select step from metrics where isinf(value)") == [(5,)]
    assert rows(run_dir, "select distinct kind, key from metrics where step = 0") == [
        ("val", "val_correct/all/mean")
    ]
    assert rows(run_dir, "select max(step) from metrics") == [(900,)]


def test_samples_are_whole_also_those_that_utf8_cannot_hold(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run[1]*'s")
    query = "select response, score, advantage from samples where step = 2 and split = 'train'"
    found = rows(run_dir, query + " order by response_length")
    assert [row[0] for row in found][: len(HOSTILE)] == [
        text.replace("\ud800", "\\ud800") for text in _leaking(run_dir)
    ]
    assert found[5][1] == 1.0 and math.isnan(float(str(found[4][2])))
    assert rows(run_dir, "select count(*) from samples where split = 'val'") == [(40,)]
    assert rows(run_dir, "select distinct group_id from samples where uid like '203-%'") == [(203,)]
    assert rows(run_dir, "select errors->>0 from samples where step = 1 and uid = '100-3'") == [
        ("math: out of time",)
    ]


def _leaking(run_dir: Path) -> list[str]:
    return [text.replace("LEAK", "http://127.0.0.1:1/leak") for text in HOSTILE]


def test_truncated_files_rolled_back_steps_and_links_out_of_the_folder_are_left_out(
    tmp_path: Path,
) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=4)
    whole = (run_dir / "samples" / "000002.parquet").read_bytes()
    (run_dir / "samples" / "000008.parquet").write_bytes(whole[:-1])
    (tmp_path / "secret.parquet").write_bytes(whole)
    (run_dir / "samples" / "000009.parquet").symlink_to(tmp_path / "secret.parquet")
    with RunFolder(run_dir, 1, resumed_at=2) as run:
        run.samples(3, [{"uid": "0-0", "response": "again"}])
    counts = rows(
        run_dir,
        "select step, count(*) from samples where split = 'train' group by all order by all",
    )
    assert counts == [(1, 16), (2, 16), (3, 1)]
    damage = query_runs([run_dir], "select 1 from samples limit 0").damage
    assert damage == (f"{run_dir}/samples/000008.parquet is damaged: its samples are missing here",)


def test_files_of_another_version_have_other_columns(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=2)
    file = run_dir / "samples" / "000002.parquet"
    table = pyarrow.parquet.read_table(file).drop_columns(["prompt"])
    pyarrow.parquet.write_table(table.append_column("later", table["uid"]), file)
    query = (
        "select step, count(uid), count(prompt) from samples where split = 'train' group by all "
        "order by 1"
    )
    answer = query_runs([run_dir], query)
    assert (answer.rows, answer.damage) == ([(1, 16, 16), (2, 16, 0)], ())


@pytest.mark.parametrize("damage", ["a page", "the footer", "other columns"])
def test_a_damaged_file_between_a_whole_beginning_and_end_hides_no_other(
    tmp_path: Path, damage: str
) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=2)
    file = run_dir / "samples" / "000002.parquet"
    content = bytearray(file.read_bytes())
    first = {"a page": 300, "the footer": len(content) - 900}.get(damage, len(content))
    content[first : first + 800] = bytes(byte ^ 0xFF for byte in content[first : first + 800])
    file.write_bytes(content)
    if damage == "other columns":
        pyarrow.parquet.write_table(pyarrow.table({"uid": [1], "response": [[2]]}), file)
    query = (
        "select step, count(response), sum(length(prompt)) > 0 from samples where split = 'train' "
        "group by all"
    )
    answer = query_runs([run_dir], query)
    assert answer.rows == [(1, 16, True)]
    assert answer.damage == (f"{file} is damaged: its samples are missing here",)
    for word in ("nonsense", "\udcff"):
        with pytest.raises(UserError, match="nonsense|udcff"):
            query_runs([run_dir], f"select {word} from samples")


def test_the_view_of_samples_has_the_columns_of_the_files_and_their_types(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=2)
    found = dict(rows(run_dir, "select column_name, column_type from (describe samples)"))
    assert list(found)[1:] == list(COLUMNS)
    assert (found["score"], found["extra"], found["versions"], found["group_id"]) == (
        "DOUBLE",
        "JSON",
        "JSON",
        "BIGINT",
    )
    assert rows(
        run_dir, "select distinct fate, restart, t > 1e9 from samples where split = 'train'"
    ) == [("trained", 0, True)]
    assert rows(
        run_dir, "select max((reward_parts->>'the answer is 15')::double) from samples"
    ) == [(1.0,)]


def test_groups_and_versions_come_from_the_ledger(tmp_path: Path) -> None:
    run_dir = write_ledger_run(tmp_path / "run")
    query = (
        "select group_id, state, step, attempts, tokens, worker from groups where group_id < 4 "
        "order by 1"
    )
    assert rows(run_dir, query) == [
        (0, "trained", 1, 1, 1000, "rank-0"),
        (1, "trained", 1, 1, 1001, "rank-0"),
        (2, "trained", 2, 2, 1002, "rank-1"),
        (3, "dropped", None, 1, None, "rank-0"),
    ]
    assert (
        rows(run_dir, "select reason from groups where group_id = 3")[0][0]
        == "\x1b]0;owned\x07\u202egnp\nnext"
    )
    assert rows(run_dir, "select step, weights from versions order by 1") == [(1, 1), (2, 2)]
    with (run_dir / "ledger.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "version", "restart": 0, "t": "x", "step": 2**70, "weights": [1]})
            + "\n"
        )
    assert rows(run_dir, "select * from versions where step is null") == [
        ("run", None, None, None, 0)
    ]
    with (run_dir / "ledger.jsonl").open("ab") as file:
        file.write(b"x" * 9_000_000)
    for view in ("groups", "versions"):
        with pytest.raises(
            UserError, match="ledger.jsonl' cannot be read: it has a line of more than"
        ):
            rows(run_dir, f"select * from {view}")


def test_only_the_files_of_the_views_that_a_query_reads_are_read(tmp_path: Path) -> None:
    """Also where a view has the name of a column."""
    run_dir = write_run(tmp_path / "run", num_steps=2)
    (run_dir / "ledger.jsonl").mkdir()
    (run_dir / "events.jsonl").unlink()
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").mkdir()
    (run_dir / "config.yaml").write_text("a: 1")
    assert rows(run_dir, "select value as versions, key as metrics from CONFIG as groups") == [
        ("1", "a")
    ]


def test_reading_many_files_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_ledger_run(tmp_path / "run")
    for view in ("metrics", "samples", "groups", "versions"):
        with pytest.raises(UserError, match="the files take too long to read: name fewer runs"):
            query_runs([run_dir], f"select count(*) from {view}", max_s=-1.0)


def test_a_word_asks_a_question_and_the_help_lists_all_of_them(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    counts = {word: len(rows(run_dir, word)) for word in QUESTIONS}
    assert counts["reward"] == counts["samples"] == counts["weights"] == 12
    assert counts["moved"] > 3 and counts["time"] > 0
    assert all(f"\n          {word} " in COMMANDS["sql"].more for word in QUESTIONS)


def test_tokens_of_saved_groups_without_a_torn_file(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=1)
    batch = Batch(torch.tensor([1, 1]), torch.tensor([2, 1]))
    batch["uid"] = ["0-0", "0-1"]
    batch["group_index"] = torch.tensor([0, 0])
    batch["response_ids"] = torch.tensor([[5, 6], [7, 0]])
    batch["response_mask"] = torch.ones(2, 2)
    batch["old_log_probs"] = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    keep_groups(run_dir, 1, batch)
    (run_dir / "tokens" / "000002.safetensors").write_bytes(
        (run_dir / "tokens" / "000001.safetensors").read_bytes()[:-3]
    )
    query = "select step, uid, position, token, is_trained, old_log_prob, ref_log_prob from tokens"
    assert rows(run_dir, query) == [
        (1, "0-0", 0, 5, True, -1.0, None),
        (1, "0-0", 1, 6, True, -2.0, None),
        (1, "0-1", 0, 7, True, -3.0, None),
    ]


def test_several_runs_have_names_and_other_views_their_columns(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run")
    second = write_run(tmp_path / "b" / "run", num_steps=3)
    found = query_runs(
        [first, second], "select run, max(step) from metrics group by run order by 2"
    ).rows
    assert found == [(str(second), 3), (str(first), 12)]
    assert rows(first, "select key, value, source from config") == [
        ("trainer.seed", "1", "preset or default")
    ]
    assert rows(first, "select rule, level, step from findings") == [("warning", "warning", 3)]
    assert rows(first, "select count(*), max(t1 - t0) < 1 from spans where actor = 'rollout'") == [
        (72, True)
    ]
    for view, columns in VIEWS.items():
        assert query_runs([tmp_path], f"select * from {view}").rows == []
        names = (
            [column.split()[0] for column in columns.split(", ")]
            if columns
            else ["run", "step", "split"]
        )
        assert query_runs([first], f"select * from {view} limit 0").columns[: len(names)] == names


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("copy (select 1) to '{run}/stolen'", "this is COPY"),
        ("attach '{run}/x.db' as x", "this is ATTACH"),
        ("select 1; select 2", "this is SELECT, SELECT"),
        ("", "this is nothing"),
        ("select * from read_text('{run}/../secret')", "file system operations are disabled"),
        ("select * from read_text('{run}/config.yaml')", "file system operations are disabled"),
        ("select * from glob('/etc/*')", "file system operations are disabled"),
        ("select nothing from metrics", '"nothing" not found'),
        ("selec 1", "syntax error"),
        (
            (
                "select count(*) from range(1000000000) a, range(1000000) b where a.range * "
                "b.range % 7 = 3"
            ),
            "more than 0.2 s",
        ),
    ],
)
def test_anything_but_one_select_over_the_views_is_refused(
    tmp_path: Path, query: str, words: str
) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=2)
    (tmp_path / "secret").write_text("secret")
    before = hashes(tmp_path)
    with pytest.raises(UserError, match=words):
        query_runs([run_dir], query.replace("{run}", str(run_dir)), max_s=0.2)
    assert hashes(tmp_path) == before


def test_the_command_prints_a_table_json_or_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(write_run(tmp_path / "run"))
    query = (
        "select response, score from samples where step = 1 and split = 'train' order by "
        "response_length limit 5"
    )
    assert main(["sql", run_dir, query, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["response"] for row in listed] == _leaking(Path(run_dir))[:5] and listed[1][
        "score"
    ] == 1.0
    assert (
        main(
            ["sql", run_dir, "select 1 as a union all select 'nan'::double", "--csv", "--rows", "1"]
        )
        == 0
    )
    shown = capsys.readouterr()
    assert shown.out == "a\n1.0\n" and "only the first 1 row of more" in shown.err
    assert main(["sql", run_dir, query]) == 0
    out = capsys.readouterr().out
    assert (
        "\x1b" not in out
        and "\\x1b]0;owned" in out
        and out.splitlines()[0].split() == ["response", "score"]
    )


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("select repeat('x', 2000000000)", "more than 700 MB"),
        ("select repeat('x', 10000000) from range(1000)", "more than 700 MB"),
        ("select sum(length(repeat('x', 500000000))) from range(1000)", "more than 0.2 s"),
    ],
)
def test_a_query_that_does_not_look_up_is_ended_and_has_no_more_memory_than_it_may(
    tmp_path: Path, query: str, words: str
) -> None:
    """Nothing of it stays: neither its process, nor its folder."""
    run_dir = write_run(tmp_path / "run", num_steps=2)
    before = set(Path(tempfile.gettempdir()).glob("distflow-sql-*"))
    with pytest.raises(UserError, match=words):
        query_runs([run_dir], query, max_s=0.2 if "0.2" in words else 60.0)
    assert multiprocessing.active_children() == []
    assert set(Path(tempfile.gettempdir()).glob("distflow-sql-*")) <= before
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert most < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 800 * 10**6


def test_values_keep_their_types(tmp_path: Path) -> None:
    query = "select {'a': [1, null]}, date '2020-01-02', 1.5::decimal(4, 1), 'a'::blob, 10::hugeint"
    found = rows(write_run(tmp_path / "run", num_steps=2), query)
    assert found == [({"a": [1, None]}, datetime.date(2020, 1, 2), Decimal("1.5"), b"a", 10)]
