"""A server ends with whoever started it, however that ends, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from distflow.rollout.servers.server_process import PrivateFolder, ServerProcess

DEADLINE_S = 60
SLEEPS = "import time; time.sleep(60)"
SERVER = (
    "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', "
    f"{SLEEPS!r}])"
)
WORKER = f"""
import sys, time, torch
from distflow.rollout.servers.server_process import PrivateFolder, ServerProcess
import pytest
folder = PrivateFolder("distflow-test-")
saved = folder.save([("a", torch.zeros(4))], 16)
process = ServerProcess([sys.executable, "-c", {SERVER!r}], {{}}, folder.path / "log")
print(folder.path, saved, process.pid, flush=True)
time.sleep({DEADLINE_S})
"""


def wait_until(holds: object) -> None:
    due = time.monotonic() + DEADLINE_S
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < due
        time.sleep(0.02)


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_worker_that_is_killed_takes_its_server_and_its_files_along():
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        folder, saved, group = worker.stdout.readline().split()
        wait_until(lambda: "begun" in (Path(folder) / "log").read_text())
        assert Path(saved).is_dir() and not is_gone(int(group))
        worker.send_signal(signal.SIGKILL)

    wait_until(lambda: is_gone(int(group)))
    assert not Path(saved).exists() and not Path(folder).exists()


@pytest.mark.slow
def test_what_a_worker_without_a_server_leaves_when_it_is_killed_the_next_one_removes():
    """Nobody else could: its server had ended, or is somebody else's."""
    code = """
import time, torch
from distflow.rollout.servers.server_process import PrivateFolder
folder = PrivateFolder("distflow-test-")
print(folder.path, folder.save([("a", torch.zeros(4))], 16), flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        left = [Path(path) for path in worker.stdout.readline().split()]
        beside = PrivateFolder("distflow-test-")
        assert all(path.is_dir() for path in left), "they are in use"
        worker.send_signal(signal.SIGKILL)

    assert all(path.is_dir() for path in left)
    after = PrivateFolder("distflow-test-")
    assert not any(path.exists() for path in left) and beside.path.is_dir() and after.path.is_dir()
    for folder in (beside, after):
        folder.remove()


def test_a_server_that_ends_takes_what_it_started_along_and_says_why(tmp_path):
    code = "import subprocess; subprocess.Popen(['sleep', '60']); raise ValueError('no such model')"
    process = ServerProcess([sys.executable, "-c", code], {}, tmp_path / "log")
    wait_until(lambda: not process.is_running())
    assert (
        "ValueError: no such model" in process.last_lines()
        and "exited with status 1" in process.last_lines()
    )
    process.kill()
    wait_until(lambda: is_gone(process.pid))


def test_processor_time_is_that_of_all_processes(tmp_path):
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = ServerProcess([sys.executable, "-c", busy], {}, tmp_path / "log")
    first = process.cpu_ticks()
    wait_until(lambda: process.cpu_ticks() > first + 20)
    os.killpg(process.pid, signal.SIGSTOP)
    wait_until(lambda: process.cpu_ticks() == process.cpu_ticks())
    process.kill()
    wait_until(lambda: is_gone(process.pid))
    assert process.cpu_ticks() == 0


def test_files_are_gone_with_their_folder_or_with_weights_that_do_not_come():
    folder = PrivateFolder("distflow-test-")
    tied = torch.arange(6.0)
    saved = folder.save([("a", tied), ("b", tied), ("c", torch.zeros(2, 3).T)], 48)

    def broken() -> object:
        yield "a", tied
        raise ValueError("no more")

    before = set(Path(saved).parent.glob(f"{folder.path.name}-*"))
    try:
        folder.save(broken(), 48)  # type: ignore[arg-type]
    except ValueError:
        assert set(Path(saved).parent.glob(f"{folder.path.name}-*")) == before

    folder.remove()
    assert not folder.path.exists() and not saved.exists()
