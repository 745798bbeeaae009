"""A file is whole or what it was, whatever happens while it is written."""

import os
import subprocess
from pathlib import Path

import pytest

from distflow.observe.crash_safe_files import remove_asides, write_atomically


def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "run.json"
    write_atomically(file, b"first")
    write_atomically(file, b"second")
    assert file.read_bytes() == b"second" and os.listdir(tmp_path) == ["run.json"]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    write_atomically(file, b"first")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"second")
    assert file.read_bytes() == b"first" and os.listdir(tmp_path) == ["run.json"]


def test_what_a_kill_left_is_removed_at_any_depth_and_nothing_else(tmp_path):
    left = (
        "config.yaml.abcd_123.distflow-partial",
        "a/b/x.arrow.12345678.distflow-partial",
        "a/b/.tmpQnv85k",
    )
    others = (
        "config.yaml.distflow-partial",
        "a/.tmp",
        "a/.tmpQnv85k.txt",
        "a/notes.tmp",
        ".distflow-partial",
    )
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()

    for path in (*(tmp_path / name for name in (*left, *others)), outside / ".tmpQnv85k"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")

    (tmp_path / "linked").symlink_to(outside)
    here = os.getcwd()

    deep = tmp_path
    for _ in range(1500):  # deeper than Python's stack
        deep.mkdir(exist_ok=True)
        os.chdir(deep)
        deep = Path("d")

    os.chdir(here)
    try:
        remove_asides(tmp_path)
    finally:
        # pytest's own removal calls itself as well
        subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)

    assert not any((tmp_path / name).exists() for name in left)
    assert all((tmp_path / name).exists() for name in others) and (outside / ".tmpQnv85k").exists()
