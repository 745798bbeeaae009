"""A model's journal: what is there after a kill, and what a saved state replaces."""

import os
from pathlib import Path

import pytest

from distflow.tinker import journal as journal_module
from distflow.tinker.journal import Journal


def save(folder: Path) -> None:
    (folder / "weights").write_text("w")


def test_requests_are_read_in_order_until_a_state_replaces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j")
    for number, kind in ((0, "create_model"), (1, "forward_backward"), (2, "optim_step")):
        journal.add(number, kind, f"body\n{number}".encode())
    journal.add(11, "forward_backward", b"eleven")
    journal.add(3, "forward_backward", b"three")
    journal.add(3, "forward_backward", b"another")

    assert journal.saved() == (0, None)
    assert not journal.is_due
    assert [tuple(each) for each in Journal(tmp_path / "j").requests()] == [
        (0, "create_model", b"body\n0"),
        (1, "forward_backward", b"body\n1"),
        (2, "optim_step", b"body\n2"),
        (3, "forward_backward", b"three"),
        (11, "forward_backward", b"eleven"),
    ]

    monkeypatch.setattr(journal_module, "_EVERY_S", 0.0)
    assert journal.is_due
    journal.save(2, save, [(1, b"passed"), (2, b"{}")])
    again = Journal(tmp_path / "j")
    number, state = again.saved()
    assert number == 2
    assert state is not None and (state / "weights").read_text() == "w"
    assert [each.number for each in again.requests()] == [0, 3, 11]
    assert dict(again.results()) == {1: b"passed", 2: b"{}"}

    journal.save(300, save, [])
    assert [each.name for each in (tmp_path / "j").iterdir() if each.is_dir()] == [
        "000000300.state"
    ]
    assert [each.number for each in again.requests()] == [0]
    assert not dict(again.results())


def test_a_request_is_on_disk_when_it_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the machine fails."""
    journal = Journal(tmp_path)
    synced = []
    monkeypatch.setattr(
        journal_module.os, "fdatasync", lambda number: synced.append(os.pread(number, 99, 0))
    )
    for number in (1, 2):
        journal.add(number, "optim_step", b"body")
    assert [each.count(b"body") for each in synced] == [1, 2]


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_request_that_a_kill_left_unfinished_is_none(tmp_path: Path, cut: int) -> None:
    """Wherever it was cut off, and what is added later is read."""
    journal = Journal(tmp_path)
    journal.add(0, "create_model", b"{}")
    journal.add(1, "optim_step", b"to be cut")
    (tmp_path / ".000000001.state.new").mkdir()
    file = tmp_path / "requests"
    file.write_bytes(file.read_bytes()[:-cut])

    again = Journal(tmp_path)
    again.add(1, "optim_step", b"whole")
    assert [tuple(each) for each in again.requests()] == [
        (0, "create_model", b"{}"),
        (1, "optim_step", b"whole"),
    ]
    assert again.saved() == (0, None)
