"""A child process below a keeper: its status is the command's, and nothing that it started outlives
it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.processes.child import Child
from tests.patience import is_running, wait_until

LEAVES = "env -i setsid sleep 600 >/dev/null 2>&1 & echo $! >{file}; {then}"
"""A process in a session of its own, without the environment, whose parent ends."""
OWNER = """
import os, sys, time
from distflow.processes.child import Child
child = Child(["/bin/sh", "-c", sys.argv[1]], os.environ)
print(child.pid, flush=True)
time.sleep(600)
"""


def pid_in(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().strip(), "the process has started")
    return int(file.read_text())


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("exit 7", 7),
        ("kill -SEGV $$", -signal.SIGSEGV),
        ("kill -KILL $$", -signal.SIGKILL),
        ("exit 0", 0),
    ],
)
def test_the_status_is_the_commands(command, status):
    child = Child(["/bin/sh", "-c", command], os.environ)
    assert child.wait(60) == status
    child.end()


@pytest.mark.parametrize(
    "way", ["ends", "is killed", "is ended", "is ended while its keeper is stopped"]
)
def test_what_it_started_ends_with_it(tmp_path, way):
    file = tmp_path / "pid"
    then = {"ends": "exit 3", "is killed": "kill -KILL $$"}.get(way, "sleep 600")
    child = Child(["/bin/sh", "-c", LEAVES.format(file=file, then=then)], os.environ)
    left = pid_in(file)

    if way.startswith("is ended"):
        assert child.status() is None and is_running(left)
        if "stopped" in way:
            os.kill(child.pid, signal.SIGSTOP)
        child.end()

    assert child.wait(60) is not None
    assert not is_running(left), "the keeper has ended it before it ended itself"


def test_it_ends_with_an_owner_that_is_killed_although_another_process_has_its_descriptors(
    tmp_path,
):
    file = tmp_path / "pid"
    command = [sys.executable, "-c", OWNER, LEAVES.format(file=file, then="sleep 600")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        keeper, left = int(owner.stdout.readline()), pid_in(file)
        owner.kill()

    wait_until(lambda: not is_running(keeper) and not is_running(left), "all of it ends")


def test_signals_to_its_group_do_not_end_the_keeper(tmp_path):
    child = Child(
        ["/bin/sh", "-c", f"trap '' HUP INT USR1; echo $$ >{tmp_path}/pid; sleep 600"], os.environ
    )
    pid_in(tmp_path / "pid")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        os.killpg(child.pid, number)
    assert child.wait(0.2) is None
    child.end()


def test_memory_is_limited():
    command = [sys.executable, "-c", "bytearray(2**30)"]
    child = Child(command, memory_bytes=2**29)
    assert child.wait(60) == 1
    child.end()


def test_what_ends_by_itself_has_a_moment(tmp_path):
    """As what a process of the run started under a keeper of its own."""
    said = tmp_path / "said"
    waits = "while kill -0 $$ 2>/dev/null; do sleep 0.02; done"
    script = f"({waits}; echo well >{said}) & echo $$ >{tmp_path}/pid; wait"

    for leaves_s in (0.0, 20.0):
        child = Child(["/bin/sh", "-c", script], leaves_s=leaves_s)
        pid_in(tmp_path / "pid")
        child.end()
        assert said.exists() == bool(leaves_s)
        (tmp_path / "pid").unlink()


def test_folders_of_an_owner_that_is_killed_are_removed(tmp_path):
    code = OWNER.replace("os.environ)", "removed=[sys.argv[2]])")
    for name in ("mine-1", "mine-2", "others"):
        (tmp_path / name).mkdir()

    command = [sys.executable, "-c", code, "sleep 600", f"{tmp_path}/mine-*"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        owner.kill()

    wait_until(lambda: len(list(tmp_path.iterdir())) == 1, "its folders are removed")
    assert (tmp_path / "others").is_dir()


def test_it_is_asked_to_end():
    child = Child(["/bin/sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.1; done"])
    while child.wait(0.2) is None:
        child.ask_to_end()
    assert child.status() == 5
    child.end()


@pytest.mark.parametrize("continued", [False, True])
def test_a_stop_lasts_unless_it_is_to_go_on(continued):
    child = Child(["/bin/sh", "-c", "kill -STOP $$; exit 6"], continued=continued)
    assert child.wait(60 if continued else 1.5) == (6 if continued else None)
    child.end()
