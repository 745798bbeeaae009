"""Data sets of every kind, and what each kind of damage is answered with."""

import csv
import json
import math
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from distflow.data import python_rows
from distflow.data.dataset_columns import Columns, plain
from distflow.data.sources import load_rows
from distflow.errors import UserError

SETS = Path(__file__).parent / "sets"
CONFIGURATIONS = """---
configs:
- {config_name: first, data_files: train.jsonl}
- {config_name: second, data_files: other.jsonl}
---
"""
GSM8K = Columns(prompt="question")
ROWS = [
    {"prompt": "1+1=", "answer": "2", "data_source": "sums", "level": 1},
    {"prompt": "2*3=", "answer": "6", "data_source": "products", "level": None},
]


def write_jsonl(path: Path, rows: list) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def function_of(folder: Path, body: str) -> str:
    (folder / "my_rows.py").write_text(f"def rows():\n    {body}\n")
    return f"{folder / 'my_rows.py'}:rows"


def load(source, columns=Columns(), **settings):  # noqa: B008  frozen
    return load_rows(source, columns, **settings)[0]


def message(source, columns=Columns(), **settings) -> str:  # noqa: B008  frozen
    with pytest.raises(UserError) as raised:
        load_rows(source, columns, **settings)
    return str(raised.value)


def test_jsonl_rows_keep_the_rest_as_extra_info(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    first, second = load(str(path))
    assert (first.prompt, first.answer, first.domain, first.extra_info) == (
        "1+1=",
        "2",
        "sums",
        {"level": 1},
    )
    assert (second.domain, second.extra_info) == ("products", {})
    assert first.origin == f"{path}:1" and second.origin == f"{path}:2"


def test_the_same_rows_from_every_format(tmp_path):
    rows = [{key: value for key, value in row.items() if key != "level"} for row in ROWS]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2000))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")

    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)

    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "lines.json").write_bytes((tmp_path / "a.jsonl").read_bytes())

    def seen(source) -> list:
        return [
            (row.prompt, row.answer, row.domain, row.extra_info)
            for row in load(source, run_folder=tmp_path)
        ]

    expected = seen(tmp_path / "a.jsonl")
    for name in ("a.json", "a.parquet", "a.csv", "bom.jsonl", "lines.json"):
        assert seen(tmp_path / name) == expected, name
    assert seen(function_of(tmp_path, f"return iter({rows!r})")) == expected


def test_several_files_in_their_order_up_to_max_samples(tmp_path):
    paths = [
        str(
            write_jsonl(tmp_path / f"{i}.jsonl", [{"prompt": f"{i}{j}", "answer": 1} for j in "ab"])
        )
        for i in "12"
    ]
    assert [row.prompt for row in load(paths)] == ["1a", "1b", "2a", "2b"]
    assert [row.prompt for row in load(paths, max_samples=3)] == ["1a", "1b", "2a"]
    assert [row.prompt for row in load(paths, max_samples=2)] == ["1a", "1b"]


def test_gsm8k_and_svamp_load():
    assert len(load(SETS / "gsm8k_test_200.jsonl", GSM8K)) == 200
    rows = load(
        SETS / "svamp_test_60.jsonl", Columns(prompt="Body", answer="Answer", domain="Type")
    )
    assert (
        len(rows) == 60 and isinstance(rows[0].answer, float) and "Equation" in rows[0].extra_info
    )


def test_nested_columns_and_extra_info_as_verl_writes_them(tmp_path):
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 7},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    (loaded,) = load(tmp_path / "a.parquet", Columns(answer="reward_model.ground_truth"))
    assert loaded.answer == "2" and loaded.prompt == [{"role": "user", "content": "1+1?"}]
    assert loaded.extra_info["split"] == "train" and loaded.extra_info["index"] == 7


def test_values_are_the_same_in_every_process_and_every_decimal_is_a_number():
    """The order of a set of texts is another in each process."""
    texts = {f"text {number}" for number in range(20)}
    assert plain({"of": texts}) == {"of": sorted(texts)}
    assert plain([Decimal("Infinity"), Decimal("1e2")]) == [math.inf, 100] and math.isnan(
        plain(Decimal("NaN"))
    )


def test_a_folder_of_the_datasets_library(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_list([{"prompt": "p", "answer": "1"}])
    table.save_to_disk(tmp_path / "one")
    assert [row.prompt for row in load(str(tmp_path / "one"))] == ["p"]
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "two")
    assert "the splits train, test: name one" in message(str(tmp_path / "two"))
    assert [row.prompt for row in load(f"{tmp_path / 'two'}::test")] == ["p"]
    write_jsonl(tmp_path / "plain" / "train.jsonl", ROWS)
    assert len(load(str(tmp_path / "plain"))) == 2
    write_jsonl(tmp_path / "plain" / "other.jsonl", ROWS[:1])
    (tmp_path / "plain" / "README.md").write_text(CONFIGURATIONS)
    assert len(load(f"{tmp_path / 'plain'}:second")) == 1


def test_a_hub_id_that_cannot_be_reached_is_the_users_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    text = message("no-such-organisation/no-such-set")
    assert "data.train_files" in text and "no-such-organisation/no-such-set" in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{folder}/trian.jsonl", "did you mean '{folder}/train.jsonl'?"),
        ("{folder}/no/train.jsonl", "there is no folder '{folder}/no'"),
        ("{folder}/notes.txt", "ends in '.txt'; known are .jsonl"),
        ("builtin:no_such_set", "no built-in data set 'no_such_set'"),
        ("no_such_module:rows", "there is no module 'no_such_module'"),
        ("{folder}/rows.py:rows", "no file '{folder}/rows.py'"),
        ("json:no_such_function", "the module has no 'no_such_function'"),
        ("{folder}/damaged.parquet", "damaged.parquet' is not Parquet"),
        ("{folder}/torn.parquet", "torn.parquet"),
        ("{folder}/latin.csv", "latin.csv' is not UTF-8"),
        ("{folder}/quote.csv", "not CSV"),
        ("{folder}/broken.json", "broken.json' is not JSON"),
        ("{folder}/empty.jsonl", "no rows in '{folder}/empty.jsonl'"),
        ("{folder}/blank.jsonl", "no rows"),
        ("{folder}/header.csv", "no rows"),
        ([], "no rows in an empty list"),
        ("{folder}/other.jsonl", "did you mean data.prompt_key=promt?"),
        (
            "{folder}/no_answer.jsonl",
            "did you mean data.answer_key=anwser?",
        ),
        (
            "{folder}/far.jsonl",
            "the column 'prompt' (data.prompt_key); columns: body, uid; set data.prompt_key to one",
        ),
    ],
)
def test_sources_that_cannot_be_read(tmp_path, source, said):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 not really")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "whole.parquet")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-10])
    (tmp_path / "latin.csv").write_bytes("prompt,answer\nd\xe9j\xe0,1\n".encode("latin-1"))
    (tmp_path / "quote.csv").write_text('prompt,answer\n"a"b,1\n')
    (tmp_path / "broken.json").write_text('[{"prompt": "a"},')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    (tmp_path / "header.csv").write_text("prompt,answer\n")
    write_jsonl(tmp_path / "other.jsonl", [{"promt": "a", "answer": "1"}])
    write_jsonl(tmp_path / "far.jsonl", [{"body": "a", "uid": "1"}])
    write_jsonl(tmp_path / "no_answer.jsonl", [{"prompt": "a", "anwser": "1"}])
    source = source.format(folder=tmp_path) if isinstance(source, str) else source
    assert said.format(folder=tmp_path) in message(source, run_folder=tmp_path / "run")


@pytest.mark.slow
def test_files_that_hold_or_stand_for_too_much_are_refused(tmp_path):
    for name, start in {"long.json": '[{"prompt": "a"}]', "long.csv": 'prompt,answer\n"'}.items():
        (tmp_path / name).write_text(start)
        with (tmp_path / name).open("r+b") as file:
            file.truncate(10 * 2**30)

    (tmp_path / "many.json").write_text("[" + "1," * 4_000_000 + "1]")
    (tmp_path / "field.csv").write_text('prompt,answer\na,"' + f"{'y' * 1_200_000}\n" * 8)
    (tmp_path / "wide.csv").write_text(
        ",".join(f"c{i}" for i in range(1000)) + "\n" + "1," * 999 + "1\n"
    )

    for name, text, rows in (
        ("long", "a" * 150_000_000, 1),
        ("same", "a" * 4_000_000, 100),
        ("many", "a", 300_000),
    ):
        texts = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * rows, pyarrow.int32()), [text]
        )
        table = pyarrow.table({"prompt": texts, "answer": ["1"] * rows})
        pyarrow.parquet.write_table(
            table, tmp_path / f"{name}.parquet", compression="zstd", write_statistics=False
        )

    said = {
        "long.json": (
            "is one list of 10,737,418,240 bytes, too large to be read at once: save it as .jsonl"
        ),
        "many.json": "save it as .jsonl",
        "long.csv": "long.csv' cannot be read: it has a line of more than 8,388,608 bytes",
        "field.csv": "not CSV: field larger than field limit",
        "wide.csv": "columns: c0, c1, c10, ",
        **dict.fromkeys(
            ("long.parquet", "same.parquet", "many.parquet"),
            "it expands to more than 134,217,728 bytes",
        ),
    }
    for name, part in said.items():
        found = message(tmp_path / name)
        assert part in found and len(found) < 2000, name


BAD_LINES = [
    (b'{"prompt": "a", "answer": "1"', "not JSON"),
    (b'{"prompt": "d\xe9", "answer": "1"}', "not UTF-8 (byte 14 of the line)"),
    (b'["prompt", "answer"]', "a JSON list, not an object"),
    (b'{"prompt": 3, "answer": "1"}', "is int 3, neither a str nor a list of chat messages"),
    (b'{"prompt": null, "answer": "1"}', "is missing"),
    (b'{"prompt": "", "answer": "1"}', "is empty"),
    (b'{"prompt": [], "answer": "1"}', "empty list"),
    (b'{"prompt": [{"role": "user"}], "answer": "1"}', "message 1 of the prompt"),
    (
        b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}',
        "message 1 of the prompt",
    ),
    (b'{"prompt": "\\ud800", "answer": "1"}', "half a surrogate pair"),
    (
        b'{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": "1"}',
        "half a surrogate pair",
    ),
    (b'{"prompt": "a"}', "no answer in the column 'answer'"),
    (b'{"prompt": "a", "answer": ""}', "no answer in the column 'answer'"),
    (b"[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_row_is_named_with_its_file_line_and_reason_or_skipped_and_counted(
    tmp_path, line, reason
):
    good = b'{"prompt": "good", "answer": "1"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"\n" + line + b"\n" + good)
    text = message(path)
    assert f"{path}:3: " in text and reason in text and "data.bad_rows=skip" in text
    rows, bad = load_rows(path, Columns(), bad_rows="skip")
    assert [row.origin for row in rows] == [f"{path}:1", f"{path}:4"]
    assert len(bad.reasons) == 1 and reason in bad.reasons[0]


def test_many_bad_rows_are_counted_and_the_first_are_shown(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n' + "oops\n" * 12)
    text = message(path)
    assert "12 bad rows" in text and "and 7 more" in text and text.count("not JSON") == 5


def test_only_bad_rows_are_an_empty_data_set(tmp_path):
    (tmp_path / "a.jsonl").write_text("oops\n" * 3)
    assert "3 bad ones were skipped, the first:" in message(tmp_path / "a.jsonl", bad_rows="skip")


def test_csv_rows_of_the_wrong_width(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\na,1\nb\nc,1,2\n")
    rows, bad = load_rows(tmp_path / "a.csv", Columns(), bad_rows="skip")
    assert [row.prompt for row in rows] == ["a"]
    assert bad.reasons == [
        f"{tmp_path / 'a.csv'}:3: no field for the column 'answer'",
        f"{tmp_path / 'a.csv'}:4: 1 more fields than columns",
    ]


def test_an_answer_is_optional_where_no_function_needs_it(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    assert load(tmp_path / "a.jsonl", Columns(answer_required=False))[0].answer is None


def test_a_domain_column_that_was_asked_for_must_be_there(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1, "topic": "t"}])
    assert load(tmp_path / "a.jsonl")[0].domain == "default"
    assert load(tmp_path / "a.jsonl", Columns(domain="topic"))[0].domain == "t"
    assert "data.domain_key=topic" in message(tmp_path / "a.jsonl", Columns(domain="topics"))


def test_responses_to_learn_from(tmp_path):
    columns = Columns(response="response", answer_required=False)
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}])
    assert load(tmp_path / "a.jsonl", columns)[0].response == "b"
    write_jsonl(
        tmp_path / "b.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": 3}]
    )
    assert "the response (column 'response') is int 3, not a text" in message(
        tmp_path / "b.jsonl", columns
    )
    write_jsonl(tmp_path / "c.jsonl", [{"prompt": "a", "completion": "b"}])
    assert "(data.response_key)" in message(tmp_path / "c.jsonl", columns)


class TestRowsOfAFunction:
    def test_they_are_read_once_and_come_back_the_same_on_resume(self, tmp_path):
        (tmp_path / "calls").write_text("")
        body = f"""
    with open({str(tmp_path / "calls")!r}, "a") as calls:
        calls.write("x")
    return ({{"prompt": f"{{i}}", "answer": i, "mixed": [1, "a", {{"b": None}}]}} for i in range(3))"""  # noqa: E501
        rows = function_of(tmp_path, body)
        first = load(rows, run_folder=tmp_path)
        again = load(rows, run_folder=tmp_path)
        assert first == again and (tmp_path / "calls").read_text() == "x"
        assert [row.answer for row in first] == [0, 1, 2] and first[0].extra_info["mixed"] == [
            1,
            "a",
            {"b": None},
        ]
        assert (tmp_path / "data" / "train_files-0.rows").is_file()

    def test_endless_ones_are_refused_unless_a_number_is_asked_for(self, tmp_path, monkeypatch):
        monkeypatch.setattr(python_rows, "MAX_ROWS", 1000)
        endless = function_of(
            tmp_path,
            """
    import itertools
    return ({"prompt": str(i), "answer": i} for i in itertools.count())""",
        )
        text = message(endless, run_folder=tmp_path)
        assert "more than 1,000 rows" in text and "data.train_max_samples" in text
        assert len(load(endless, run_folder=tmp_path, max_samples=7)) == 7

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("return 3", "gives int, which cannot be iterated over"),
            ("return ['a']", "my_rows.py:rows' is str"),
            ("return []", "no rows"),
            ("return {}['split']", "my_rows.py:rows' raised KeyError: 'split' (at my_rows.py:2)"),
            (
                "yield {'prompt': 'a', 'answer': 1}; raise OSError('no such disk')",
                "raised OSError: no such disk",
            ),
        ],
    )
    def test_what_gives_no_rows_is_refused(self, tmp_path, body, said):
        assert said in message(function_of(tmp_path, body), run_folder=tmp_path)

    def test_they_need_a_run_folder(self, tmp_path):
        assert "run's folder" in message(function_of(tmp_path, "return []"))


def test_a_name_that_another_program_would_have_changed_is_told():
    assert "${oc.env:NAME}/..." in message("$HOME/x.jsonl")
