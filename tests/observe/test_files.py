"""A file is whole or what it was, whatever happens while it is written."""

import os
from pathlib import Path

import pytest

from distflow.observe.files import write_atomically


def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_atomically(file, b"first")
    write_atomically(file, b"second")
    assert file.read_bytes() == b"second" and os.listdir(tmp_path) == ["run.json"]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    write_atomically(file, b"first")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"second")
    assert file.read_bytes() == b"first" and os.listdir(tmp_path) == ["run.json"]
