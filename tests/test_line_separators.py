"""U+2028, U+2029 and U+0085 separate lines for `str.splitlines`, but are valid inside a JSON
record: each reader of records finds whole ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.cli import main
from distflow.commands.dashboard_page_data import Dashboard
from distflow.commands.migration.read_files import read_foreign
from distflow.data.rows_on_demand import index_file
from distflow.data.sources import read_file
from distflow.environments.builtin_tools import Search
from distflow.observe.crash_safe_files import LineFile, read_records
from distflow.observe.sample_files import read_sample_file, write_sample_file
from tests.commands.test_why import write_run as write_ledger_run
from tests.observe.conftest import write_asynchronous_run

TEXT = "one\u2028two\u2029three\u0085four\x0bfive\x1csix"


def lines(path: Path, *records: object) -> Path:
    path.write_text(
        "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_file_of_data(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    lines(path, {"prompt": TEXT}, {"prompt": "b"}) if suffix == "jsonl" else lines(
        path, [{"prompt": TEXT}]
    )
    assert next(iter(read_file(path, "data.train_files")))[1]["prompt"] == TEXT
    assert suffix == "json" or index_file(path, tmp_path, "data.train_files").num_rows == 2


def test_the_texts_of_the_search_tool(tmp_path: Path) -> None:
    assert (
        Search(str(lines(tmp_path / "texts.jsonl", {"text": TEXT}, {"text": "seven"})))("four")
        == TEXT
    )
    (tmp_path / "texts.txt").write_text(f"{TEXT}\nseven\n", encoding="utf-8")
    assert Search(str(tmp_path / "texts.txt"))("four") == TEXT


def test_the_journals_and_samples_of_a_run(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "events.jsonl")
    file.append({"what": TEXT})
    file.close()
    lines(tmp_path / "raw.jsonl", {"what": TEXT})
    for name in ("events.jsonl", "raw.jsonl"):
        for max_bytes in (None, 10_000):
            assert read_records(tmp_path / name, max_bytes) == ([{"what": TEXT}], 0)
    path = tmp_path / "samples" / "000001.parquet"
    write_sample_file(path, [{"uid": "a", "prompt": TEXT}], 1, "train")
    assert read_sample_file(path, tmp_path)[0][0]["prompt"] == TEXT


def test_commands_to_migrate(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(
        f"trl sft --model_name_or_path m \\\n  --system_prompt '{TEXT}' --seed 3\n",
        encoding="utf-8",
    )
    found = read_foreign(tmp_path / "x.sh")
    assert found.values["system_prompt"] == TEXT and found.lines["seed"] == 2


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[object]:
    """What the commands, the report, the trace and the dashboard's pages show of a run."""
    name = folder.name
    for arguments in (["why", "1", "--json"], ["doctor"], ["report", "--trace", "1"], ["report"]):
        main([arguments[0], str(folder), *arguments[1:]])
    found: list[object] = [capsys.readouterr().out]
    found += [file.read_text("utf-8") for file in sorted(folder.glob("*.json"))]
    found.append((folder / "report.html").read_text("utf-8"))
    dashboard = Dashboard(folder.parent)
    for part in ("curves", "step", "time", "trust"):
        found.append(dashboard.answer(part, [name], {"step": "1"}))
    return found


@pytest.mark.parametrize("write", [write_asynchronous_run, write_ledger_run], ids=["run", "ledger"])
def test_the_pages_and_commands_that_show_a_run(
    write: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run")
    files = [*folder.rglob("*.jsonl")]
    assert files
    before = shown(folder, capsys)
    for file in files:
        records = [json.loads(line) for line in file.read_bytes().split(b"\n") if line]
        lines(file, *({**each, "unknown": TEXT} for each in records))
    assert shown(folder, capsys) == before
