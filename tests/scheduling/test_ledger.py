"""The ledger: exact accounts across torn lines, kills at every byte, rollbacks, and rollbacks of
rollbacks."""

from dataclasses import replace

import pytest

from distflow.scheduling.group_states import CountsError, GroupCounts
from distflow.scheduling.ledger import Ledger, LedgerError, timeline
from tests.ledger_audit import verify
from tests.ledger_counts import counted


def issue(ledger, number, attempt=0):
    ledger.append("issued", group_id=number, epoch=0, row=number, version=0, attempt=attempt)


def write_step(ledger, step, group_ids, drop=()):
    """A step in which `group_ids` are drawn, those in `drop` dropped, and the rest consumed."""
    for number in group_ids:
        issue(ledger, number)
    kept = [number for number in group_ids if number not in drop]
    for number in drop:
        ledger.append("dropped", group_id=number, reason="equal_rewards")
    for number in kept:
        ledger.append("complete", group_id=number, tokens=7)
    ledger.append("consumed", step=step, group_ids=kept, tokens=7 * len(kept))
    ledger.append("version", step=step, weights=step)
    ledger.sync()


def test_the_account_of_a_journal(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1, 2], drop=[1])
    issue(ledger, 3)
    issue(ledger, 4)
    ledger.append("complete", group_id=4, tokens=9)
    ledger.append("allowed_change", key="actor.clip_ratio")
    group_counts = GroupCounts(
        issued=5, running=1, complete=1, consumed=2, dropped={"equal_rewards": 1}
    )
    assert counted(ledger.path) == group_counts
    ledger.close()
    assert verify(path) == group_counts


def test_a_kill_at_any_byte_leaves_a_journal_that_reads_and_resumes(tmp_path):
    """Cut behind every third byte: the whole lines hold, the torn one is passed over, and a resume
    repeats the run."""
    path = tmp_path / "whole.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    mark = ledger.mark()
    write_step(ledger, 2, [2, 3], drop=[2])
    ledger.close()
    content = path.read_bytes()
    expected = verify(path)

    for cut in range(0, len(content), 3):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(content[:cut])
        if b"\n" in content[:cut]:
            counted(torn).check()
        whole_mark = mark if cut >= mark.offset else None
        resumed = Ledger(torn, whole_mark)
        assert not resumed.inherits
        if whole_mark is None:
            write_step(resumed, 1, [0, 1])
        write_step(resumed, 2, [2, 3], drop=[2])
        resumed.close()
        assert verify(torn) == expected, f"cut behind byte {cut}"
        assert torn.read_bytes().startswith(content[:cut]) or b"\n" not in content[:cut], (
            "nothing is rewritten"
        )


def test_incarnations_rise_whatever_checkpoint_is_resumed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    mark = ledger.mark()
    assert ledger.restart == 0
    ledger.close()

    for restart in (1, 2, 3):
        ledger = Ledger(path, mark)
        assert ledger.restart == restart
        ledger.close()

    assert [r["restart"] for _, r in timeline(path)] == [0, 3]


def test_a_rollback_to_a_checkpoint_of_an_abandoned_timeline(tmp_path):
    """Steps 1 and 2, back to the first; another step 2; then the user resumes from the old step 2
    after all."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    first = ledger.mark()
    write_step(ledger, 2, [2, 3, 4], drop=[3])
    second = ledger.mark()
    ledger.close()
    old = verify(path)

    ledger = Ledger(path, first)
    write_step(ledger, 2, [2, 3])
    write_step(ledger, 3, [4, 5])
    ledger.close()
    assert verify(path) == GroupCounts(issued=6, consumed=6)

    ledger = Ledger(path, second)
    assert (
        counted(ledger.path)
        == old
        == GroupCounts(issued=5, consumed=4, dropped={"equal_rewards": 1})
    )
    write_step(ledger, 3, [5, 6])
    ledger.close()
    assert verify(path) == GroupCounts(issued=7, consumed=6, dropped={"equal_rewards": 1})
    steps = [(r["step"], r["group_ids"]) for _, r in timeline(path) if r["kind"] == "consumed"]
    assert steps == [(1, [0, 1]), (2, [2, 4]), (3, [5, 6])]


def test_a_run_from_the_start_over_an_old_journal_takes_everything_back(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    ledger.close()
    ledger = Ledger(path)
    assert ledger.restart == 1
    assert counted(ledger.path) == GroupCounts()
    write_step(ledger, 1, [0, 1, 2])
    ledger.close()
    assert verify(path) == GroupCounts(issued=3, consumed=3)


def test_a_checkpoint_from_another_folder_hands_over_its_account(tmp_path):
    elsewhere = Ledger(tmp_path / "old.jsonl")
    write_step(elsewhere, 1, [0, 1, 2], drop=[1])
    ledger = Ledger(tmp_path / "new.jsonl", elsewhere.mark())
    assert ledger.inherits and ledger.restart == 1
    ledger.append("inherited", step=1, issued=3, consumed=2, dropped={"equal_rewards": 1})
    assert counted(ledger.path) == counted(elsewhere.path)
    write_step(ledger, 2, [3, 4])
    ledger.append("complete", group_id=1, tokens=1)
    with pytest.raises(CountsError, match="group 1 .* settled"):
        counted(ledger.path)


def test_groups_that_were_on_the_edge_of_another_folder_go_on(tmp_path):
    elsewhere = Ledger(tmp_path / "old.jsonl")
    ledger = Ledger(tmp_path / "new.jsonl", elsewhere.mark())
    live = [
        {"group_id": 1, "attempt": 1, "complete": False},
        {"group_id": 2, "attempt": 0, "complete": True},
    ]
    ledger.append(
        "inherited", step=1, issued=4, consumed=1, dropped={"equal_rewards": 1}, live=live
    )
    assert counted(ledger.path) == GroupCounts(
        issued=4, running=1, complete=1, consumed=1, dropped={"equal_rewards": 1}
    )
    issue(ledger, 1, attempt=2)
    ledger.append("complete", group_id=1, tokens=1)
    ledger.append("consumed", step=2, group_ids=[1, 2], tokens=2)
    ledger.append("version", step=2, weights=2)
    ledger.close()
    assert verify(ledger.path) == GroupCounts(issued=4, consumed=3, dropped={"equal_rewards": 1})


MOVES = {
    "issued": {"group_id": 1, "epoch": 0, "row": 1, "version": 0, "attempt": 0},
    "complete": {"group_id": 1, "tokens": 1},
    "dropped": {"group_id": 1, "reason": "late"},
    "consumed": {"step": 2, "group_ids": [1], "tokens": 1},
}


@pytest.mark.parametrize("kind", MOVES)
def test_what_was_consumed_cannot_move_again(tmp_path, kind):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    ledger.append(kind, **MOVES[kind])
    ledger.close()
    with pytest.raises(CountsError, match="group 1 .*trained"):
        verify(path)


def test_a_running_ticket_is_issued_again_only_as_a_further_attempt(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    issue(ledger, 0)
    issue(ledger, 0, attempt=1)
    assert counted(ledger.path) == GroupCounts(issued=1, running=1)
    issue(ledger, 0, attempt=1)
    with pytest.raises(CountsError, match="group 0 .*attempt 1"):
        counted(ledger.path)


def test_gaps_are_found(tmp_path):
    ledger = Ledger(tmp_path / "groups.jsonl")
    issue(ledger, 3)
    with pytest.raises(CountsError, match="group 3 .* but 0 is the next"):
        counted(ledger.path)
    ledger = Ledger(tmp_path / "steps.jsonl")
    ledger.append("consumed", step=2, group_ids=[], tokens=0)
    with pytest.raises(CountsError, match="step 2 .* but 1 is the next"):
        counted(ledger.path)


def test_a_row_that_goes_out_under_two_tickets_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    issue(ledger, 0)
    ledger.append("issued", group_id=1, epoch=0, row=0, version=0, attempt=0)
    ledger.close()
    with pytest.raises(CountsError, match="row 0 of epoch 0.*0 and 1"):
        verify(path)


def test_a_consumed_step_without_a_version_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append("consumed", step=1, group_ids=[], tokens=0)
    ledger.close()
    with pytest.raises(CountsError, match="1 steps.*0"):
        verify(path)


@pytest.mark.parametrize("at", ["a line's start", "a line's middle"])
def test_bytes_that_another_writer_wrote_over_are_taken_back_with_what_follows(tmp_path, at):
    """A writer that began the file does not append: it writes over the lines of one that came
    later."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    mark = ledger.mark()
    write_step(ledger, 2, [2, 3])
    write_step(ledger, 3, [4, 5])
    ledger.close()
    content = bytearray(path.read_bytes())
    start = content.index(b"\n", mark.offset) + 1
    place = {
        "a line's start": start,
        "a line's middle": start + 9,
    }[at]
    content[place : place + 70] = b"7" * 70
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="is damaged"):
        counted(path)
    ledger = Ledger(path, mark)
    write_step(ledger, 2, [2, 3])
    ledger.close()
    assert verify(path) == GroupCounts(issued=4, consumed=4)
    assert path.read_bytes().startswith(bytes(content))


def test_a_mark_within_a_line_is_no_place_to_go_on_from(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    mark = ledger.mark()
    ledger.close()

    for shifted in (mark.offset - 9, mark.offset + 1):
        with pytest.raises(LedgerError, match=r"ledger\.jsonl .* byte \d+"):
            Ledger(path, replace(mark, offset=shifted))

    Ledger(path, mark).close()


def test_damage_in_the_middle_is_told_apart_from_a_torn_end(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    mark = ledger.mark()
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\x00\x00\xff\n", *lines[2:]]))
    where = f"damaged at byte {len(lines[0]) + len(lines[1])}"
    with pytest.raises(LedgerError, match=where):
        verify(path)
    with pytest.raises(LedgerError, match=rf"{where}.*trainer\.default_local_dir"):
        Ledger(path, mark)


def test_a_journal_that_lost_lines_of_its_checkpoint_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    write_step(ledger, 1, [0, 1])
    mark = ledger.mark()
    ledger.close()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(LedgerError, match="ends before byte"):
        Ledger(path, mark)


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("hello\nworld\n")
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger(path)
