"""Encoded rows in a file: the very rows that were written, in any process, or one clear error."""

import math
import multiprocessing
import operator
import pickle
import random
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.dataset_columns import BadRows, RawRow
from distflow.data.encode_rows import encode_rows
from distflow.data.encoded_prompts import PromptOptions, PromptSet
from distflow.data.encoded_rows_file import EncodedRows, write_encoded
from distflow.errors import UserError
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
ROWS = st.builds(
    RawRow,
    origin=st.text(max_size=5),
    prompt=st.text("ab1+=", min_size=1, max_size=20),
    answer=VALUES,
    domain=st.sampled_from(["default", "math", "ü\ud83d"]),
    response=st.none(),
    extra_info=st.dictionaries(st.text(max_size=3), VALUES, max_size=4),
)


def encode(rows) -> PromptSet:
    return encode_rows(rows, TOKENIZER, PromptOptions(100, 100), BadRows())


def prompts_of(num_rows, response=None) -> PromptSet:
    responses = [response and f"{response}{i}" for i in range(num_rows)]
    return encode(
        [
            RawRow(f"f:{i}", f"{i}+1=", i + 1, f"d{i % 3}", text, {"i": i})
            for i, text in enumerate(responses)
        ]
    )


def kinds(value):
    """The types of a value all the way down: True == 1 == 1.0, and -0.0 == 0.0."""
    if isinstance(value, dict):
        return {key: kinds(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kinds(entry) for entry in value]
    return type(value), math.copysign(1, value) if isinstance(value, float) else None


@settings(deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=4))
def test_the_same_values_of_the_same_types_come_back(tmp_path_factory, rows):
    prompts = encode(rows)
    found = EncodedRows(write_encoded(prompts, tmp_path_factory.mktemp("run"), "train"))
    assert list(found) == list(prompts)
    assert [kinds(vars(row)) for row in found] == [kinds(vars(row)) for row in prompts]
    assert [list(row.extra_info) for row in found] == [list(row.extra_info) for row in prompts], (
        "in their order"
    )
    assert (found.domains, found.fingerprint()) == (prompts.domains, prompts.fingerprint())


def test_infinities_and_nan_come_back(tmp_path):
    prompts = encode([RawRow("f:1", "a", [math.inf, -math.inf, math.nan], "d", None, {})])
    answer = EncodedRows(write_encoded(prompts, tmp_path, "train"))[0].ground_truth
    assert answer[:2] == [math.inf, -math.inf] and math.isnan(answer[2])


def test_a_sequence_over_several_chunks(tmp_path):
    prompts = prompts_of(2345)
    rows = EncodedRows(write_encoded(prompts, tmp_path, "train"))
    assert len(rows) == 2345
    for index in (0, 999, 1000, 2344, -1, -2345):
        assert rows[index] == prompts[index]

    for part in (
        slice(995, 1005),
        slice(-3, None),
        slice(None, None, 400),
        slice(5, 2, -1),
        slice(9, 9),
    ):
        assert rows[part] == prompts[part]

    for index in (2345, -2346):
        with pytest.raises(IndexError):
            rows[index]

    assert rows.domains == ["d0", "d1", "d2"]


def test_responses_come_back(tmp_path):
    prompts = prompts_of(3, response="r")
    rows = EncodedRows(write_encoded(prompts, tmp_path, "train"))
    assert list(rows) == list(prompts) and all(row.response_ids for row in rows)
    assert EncodedRows(write_encoded(prompts_of(3), tmp_path, "train"))[0].response_ids is None


def test_turns_come_back(tmp_path):
    talk = [
        {"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")
    ]
    prompts = encode(
        [RawRow(f"f:{i}", talk[: 2 * i], None, "d", None, {}, is_conversation=True) for i in (1, 2)]
    )
    rows = EncodedRows(write_encoded(prompts, tmp_path, "train"))
    assert list(rows) == list(prompts) and [row.turns for row in rows] == [
        ((0, 2),),
        ((0, 2), (20, 22)),
    ]
    assert [part.owner for part in rows[1].answer(3)] == ["policy", "environment", "policy"]
    assert [i for part in rows[1].answer(3) for i in part.token_ids] == list(rows[1].response_ids)


def test_the_file_is_the_owners_and_is_kept_while_it_fits(tmp_path):
    prompts = prompts_of(3)
    file = write_encoded(prompts, tmp_path, "train")
    assert file == tmp_path / "data" / f"train-{prompts.fingerprint()[:12]}.rows"
    assert (
        stat.S_IMODE(file.stat().st_mode) == 0o600
        and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    )
    written = file.stat().st_ino
    assert write_encoded(prompts, tmp_path, "train") == file and file.stat().st_ino == written
    other = write_encoded(prompts_of(4), tmp_path, "train")
    assert other != file and len(EncodedRows(file)) == 3
    other.rename(file)
    assert list(EncodedRows(write_encoded(prompts, tmp_path, "train"))) == list(prompts), (
        "it held another set"
    )
    file.write_bytes(file.read_bytes()[:-100])
    assert list(EncodedRows(write_encoded(prompts, tmp_path, "train"))) == list(prompts), (
        "it was torn"
    )
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name]


def test_it_travels_as_its_path(tmp_path, monkeypatch):
    prompts = prompts_of(2000)
    monkeypatch.chdir(tmp_path)
    rows = EncodedRows(write_encoded(prompts, tmp_path, "train").relative_to(tmp_path))
    assert len(pickle.dumps(rows)) < 500
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(operator.getitem, (rows, 1)) == prompts[1]


@pytest.mark.slow
def test_rows_are_not_held(tmp_path):
    """Walking over all of them keeps no Python objects: within a process that may take 40 MB more,
    60 MB are read."""
    prompts = encode([RawRow(f"f:{i}", "1+1=", "x" * 6000, "d", None, {}) for i in range(10_000)])
    file = write_encoded(prompts, tmp_path, "train")
    assert file.stat().st_size > 60e6
    code = f"""
import re
from pathlib import Path
from distflow.data.encoded_rows_file import EncodedRows
def anonymous_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
rows = EncodedRows(Path({str(file)!r}))
before = anonymous_bytes()
assert sum(len(row.ground_truth) for row in rows) == 60_000_000
assert anonymous_bytes() - before < 40e6, anonymous_bytes() - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_foreign_file_is_the_users_error(tmp_path):
    (tmp_path / "text.rows").write_text("hello")
    (tmp_path / "empty.rows").touch()
    for name in ("text", "empty", "missing"):
        with pytest.raises(UserError, match=rf"{name}\.rows' .*Delete the file"):
            EncodedRows(tmp_path / f"{name}.rows")


def test_a_changed_id_is_found(tmp_path):
    prompts = prompts_of(3)
    file = write_encoded(prompts, tmp_path, "train")
    ids = str(list(prompts[1].prompt_ids)).encode()
    content = file.read_bytes()
    assert content.count(ids) == 1
    file.write_bytes(content.replace(ids, ids.replace(b",", b"1,", 1)))
    assert EncodedRows(file)[0] == prompts[0]
    with pytest.raises(UserError, match="row 1 .*Delete the file"):
        EncodedRows(file)[1]


def test_a_flipped_bit_anywhere_changes_no_row_unseen(tmp_path):
    prompts = prompts_of(6, response="r")
    file = write_encoded(prompts, tmp_path, "train")
    content = file.read_bytes()
    rng = random.Random(0)

    num_found = 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)

        try:
            rows = EncodedRows(file)
            assert list(rows) == list(prompts)
            assert (rows.domains, rows.fingerprint()) == (prompts.domains, prompts.fingerprint())
        except UserError:
            num_found += 1

    assert num_found > len(content) / 5, "the rest is white space"
