"""A model's journal: what is there after a kill, and what a saved state replaces."""

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
        journal.add(number, kind, f"body {number}".encode())
        journal.answer(number, {"number": number})
    journal.add(11, "forward_backward", b"eleven")
    journal.add(3, "forward_backward", b"three")
    journal.add(3, "forward_backward", b"another")
    journal.answer(3, b"passed")

    assert journal.state() is None
    assert not journal.is_due
    found = [*Journal(tmp_path / "j").requests()]
    assert found == [
        (0, "create_model", b"body 0"),
        (1, "forward_backward", b"body 1"),
        (2, "optim_step", b"body 2"),
        (3, "forward_backward", b"three"),
        (11, "forward_backward", b"eleven"),
    ]

    monkeypatch.setattr(journal_module, "_EVERY_S", 0.0)
    assert journal.is_due
    journal.save(2, save)
    again = Journal(tmp_path / "j")
    state = again.state()
    assert state is not None and (state / "weights").read_text() == "w"
    assert [number for number, _, _ in again.requests()] == [0, 3, 11]
    assert dict(again.results()) == {
        **{number: {"number": number} for number in range(3)},
        3: b"passed",
    }

    journal.save(300, save)
    assert [each.name for each in (tmp_path / "j").iterdir() if each.is_dir()] == [
        "000000300.state"
    ]
    assert [number for number, _, _ in again.requests()] == [0]
    assert not dict(again.results())


def test_files_that_a_kill_left_unfinished_are_no_requests(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(0, "create_model", b"{}")
    (tmp_path / ".000000001.optim_step").write_bytes(b"to")
    (tmp_path / ".000000002.state.new").mkdir()
    assert [*journal.requests()] == [(0, "create_model", b"{}")]
    assert journal.state() is None
