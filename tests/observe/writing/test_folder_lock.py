"""Whose a folder is: a run takes a new one, an empty one and a run's, and changes nothing in
another."""

import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from distflow.errors import UserError
from distflow.observe.report.build import write_report
from distflow.observe.writing import run_folder as folder_lock
from distflow.observe.writing.run_folder import (
    RunFolder,
    RunFolderError,
    claim_again,
    claimed,
    is_ours,
    join,
    writer_of,
)


def state_of(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Every entry with its mode and its bytes, the folder itself among them."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in (folder, *folder.rglob("*"))
    }


SOMEBODYS: dict[str, dict[str, str]] = {
    "notes": {"notes.txt": "mine"},
    "a hidden file": {".gitkeep": ""},
    "a config": {"config.yaml": "a: 1\n"},
    "a run.json of another pipeline": {"run.json": '{"id": 3}', "events.jsonl": "{}\n"},
    "a run.json that is none": {"run.json": "\x00\x01"},
    "a run.json that is deep": {"run.json": "[" * 100_000},
    "checkpoints of another pipeline": {
        "checkpoints/old.removed/x": "1",
        "checkpoints/model.safetensors.partial": "2",
        "checkpoints/step-1000/w": "3",
    },
    "a file of the lock's name": {".writer": "mine"},
    "an empty file of the lock's name beside others": {".writer": "", "thesis.txt": "mine"},
    "a report": {"report.html": "<h1>mine</h1>"},
    "names that act": {"\x1b]52;c;aGk=\x07": "1", "a\nb": "2"},
}


@pytest.mark.parametrize("what", SOMEBODYS)
@pytest.mark.parametrize("mode", [0o755, 0o2775])
def test_somebodys_folder_is_refused_and_left_as_it_is(tmp_path, what, mode):
    folder = tmp_path / "theirs"
    for name, text in SOMEBODYS[what].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    folder.chmod(mode)
    before = state_of(folder)

    for attempt in (lambda: RunFolder(folder, 0), lambda: claimed(folder).__enter__()):
        with pytest.raises(RunFolderError, match="theirs .* not from ") as refused:
            attempt()
        assert "trainer.default_local_dir" in str(refused.value) and "\x1b" not in str(
            refused.value
        )

    with pytest.raises(UserError):
        write_report(folder)
    assert state_of(folder) == before


def test_what_was_found_is_said(tmp_path):
    for name in ("b.txt", "a.txt", "d.txt", "c.txt", "e.txt"):
        (tmp_path / name).touch()
    with pytest.raises(RunFolderError, match=r"\(a.txt, b.txt, c.txt, d.txt and 1 more\)"):
        RunFolder(tmp_path, 0)


@pytest.mark.parametrize("copied", ["as it is", "without hidden files", "through a link"])
def test_a_runs_folder_is_taken_again(tmp_path, copied):
    folder = tmp_path / "run"
    with RunFolder(folder, 0) as run:
        run.write_json("run.json", {"distflow": "0.1.0"})
    (folder / "notes.txt").write_text("mine")

    if copied == "without hidden files":
        (folder / ".writer").unlink()
        (folder / ".distflow-run").unlink()

    if copied == "through a link":
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"

    with RunFolder(folder, 1):
        pass
    write_report(folder)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "left", ["nothing", "an empty folder", "the lock", "the lock and its mark"]
)
def test_a_first_start_that_was_killed_is_started_again(tmp_path, left):
    folder = tmp_path / "run"
    if left != "nothing":
        folder.mkdir()
    if left.startswith("the lock"):
        (folder / ".writer").touch(0o600)

    if left.endswith("mark"):
        (folder / ".distflow-run").touch(0o600)
        (folder / "data").mkdir()

    with RunFolder(folder, 0):
        pass


def test_a_report_of_a_run_that_goes_on_does_not_let_another_in(tmp_path):
    with RunFolder(tmp_path / "run", 0):
        write_report(tmp_path / "run")
        pid = os.fork()
        if pid == 0:
            try:
                RunFolder(tmp_path / "run", 1)
            except RunFolderError:
                os._exit(0)
            os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def end_of(child: Callable[[], object]) -> str:
    """What a process of its own ends with: the message of the folder's error, or nothing."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except RunFolderError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)

    os.close(writes)
    with open(reads) as said:
        text = said.read()
    os.waitpid(pid, 0)

    return text


@contextmanager
def living(child: Callable[[], object]) -> Iterator[int]:
    """A process that has called `child` and does nothing more."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os.write(writes, b".")
            signal.pause()
        finally:
            os._exit(1)

    os.close(writes)
    try:
        assert os.read(reads, 1) == b".", "it failed"
        yield pid
    finally:
        os.close(reads)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def claim_once(folder: Path) -> None:
    with claimed(folder):
        pass


def test_whoever_is_refused_learns_who_writes_and_leaves_the_folder_as_it_is(tmp_path):
    folder, kept = tmp_path / "run", ExitStack()
    with living(lambda: kept.enter_context(claimed(folder))) as writer:
        before = state_of(folder)
        with pytest.raises(RunFolderError) as refused:
            claim_once(folder)
        assert state_of(folder) == before

    who = re.escape(f"another process (pid {writer} on {os.uname().nodename} since ")
    assert re.match(
        rf"{who}\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \S+\) is writing to the run's folder",
        str(refused.value),
    )
    claim_once(folder)  # nobody writes any more


def test_claims_nest_and_the_last_to_leave_gives_the_folder_back(tmp_path):
    folder = tmp_path / "run"
    with claimed(folder):
        with claimed(folder), RunFolder(folder, 0):
            pass
        assert "another process" in end_of(lambda: claim_once(folder))
    assert not end_of(lambda: claim_once(folder))


def test_a_forked_process_neither_holds_a_claim_nor_ends_it(tmp_path):
    folder = tmp_path / "run"
    with claimed(folder) as owner:
        assert str(os.getpid()) in owner
        with living(lambda: None) as child:
            assert "another process" in end_of(lambda: claim_once(folder))

    with claimed(folder), living(lambda: None):
        pass
    claim = claimed(folder)
    claim.__enter__()

    with living(lambda: None) as child:
        claim.__exit__(None, None, None)
        os.kill(child, 0)
        assert not end_of(lambda: claim_once(folder)), (
            "a child that outlives the claim does not keep it"
        )


def test_a_start_waits_for_the_end_of_who_joined_an_earlier_one(tmp_path, monkeypatch):
    """As where the process that started a run is killed, and its workers live on for a moment."""
    folder = tmp_path / "run"
    with ExitStack() as joined:
        with claimed(folder) as owner:
            worker = joined.enter_context(living(lambda: join(folder, owner)))

        assert writer_of(folder) == worker
        monkeypatch.setattr(folder_lock, "_END_WITHIN_S", 0.1)
        assert f"process {worker} of an earlier start still writes" in end_of(
            lambda: claim_once(folder)
        )
        monkeypatch.undo()
        reads, writes = os.pipe()

        pid = os.fork()
        if pid == 0:
            try:
                claim_once(folder)
                os.write(writes, b".")
            finally:
                os._exit(0)

        os.close(writes)

    assert os.read(reads, 1) == b".", "it came to write once the other had ended"
    os.close(reads)
    os.waitpid(pid, 0)


def test_a_worker_of_an_earlier_start_that_comes_late_is_refused(tmp_path):
    folder, kept = tmp_path / "run", ExitStack()
    with claimed(folder) as owner, living(lambda: join(folder, owner)):
        pass
    with living(lambda: kept.enter_context(claimed(folder))):
        assert "another start has taken" in end_of(lambda: join(folder, owner))


def test_a_restart_in_place_waits_for_who_joined_refuses_the_late_and_never_gives_the_folder_up(
    tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    monkeypatch.setattr(folder_lock, "_END_WITHIN_S", 0.1)

    with claimed(folder) as owner:
        with (
            living(lambda: join(folder, owner)) as worker,
            pytest.raises(RunFolderError, match=f"process {worker} .*earlier start"),
        ):
            claim_again(folder, 1)

        again = claim_again(folder, 2)
        assert again.endswith(", restart 2") and "another process" in end_of(
            lambda: claim_once(folder)
        )
        assert "another start has taken" in end_of(lambda: join(folder, owner))
        with living(lambda: join(folder, again)):
            pass


def test_a_claim_marks_the_folder_before_anything_else_is_written(tmp_path):
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "data").mkdir()
    assert is_ours(tmp_path / "run")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_what_is_made_under_a_claim_is_for_its_owner_alone(tmp_path, umask):
    old = os.umask(umask)
    try:
        with claimed(tmp_path / "run"):
            (tmp_path / "run" / "file").write_text("")
            (tmp_path / "run" / "folder").mkdir()
        assert os.umask(umask) == umask, "it is what it was"
    finally:
        os.umask(old)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
    assert modes["file"] == 0o600 and modes["folder"] == 0o700
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "file/below"])
def test_a_path_that_cannot_be(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="run's folder .* used: "):
        RunFolder(tmp_path / path, 0)
