"""A process that is killed leaves nothing that it started."""

import os
import signal
import subprocess
import sys

import pytest

from tests.patience import is_running, wait_until

STARTS = {
    "fork": "left = os.fork() or time.sleep(600)",
    "session": """
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        time.sleep(600)
    os.write(write, str(pid).encode())
    os._exit(0)
left = int(os.read(read, 20))
""",
    "popen": "left = subprocess.Popen(['sleep', '600'], start_new_session=True).pid",
    "own environment": """
left = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True).pid
time.sleep(2.5)  # until it has been seen
""",
    "background": """
text = subprocess.run(['sh', '-c', 'sleep 600 >&2 & echo $!'], stdout=subprocess.PIPE).stdout
left = int(text)
""",
    "spawn": """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
left = pool.submit(os.getpid).result()
""",
    "forkserver": """
import multiprocessing
pool = multiprocessing.get_context("forkserver").Pool(1)
left = pool.apply(os.getpid)
""",
    "below a keeper": """
from distflow.processes.child import Child
left = Child(["sleep", "600"], os.environ).pid
""",
}
PROCESS = """
import os, subprocess, sys, time
from distflow.processes.survivors import survivors_ended
with survivors_ended():
    if __name__ == "__main__":
        {code}
        print(left, flush=True)
        {end}
"""
LATER = {"killed": "time.sleep(600)", "ended": "os._exit(0)"}
SLOW = ("spawn", "forkserver")


@pytest.mark.parametrize("end", LATER)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in STARTS],
)
def test_nothing_is_left_after_a_kill(kind, end, tmp_path):
    file = tmp_path / "starts.py"
    code = STARTS[kind].strip().replace("\n", "\n        ")
    file.write_text(PROCESS.format(code=code, end=LATER[end]))

    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = int(owner.stdout.readline())
        if end == "killed":
            assert is_running(left)
            os.kill(owner.pid, signal.SIGKILL)
        owner.wait(60)

    wait_until(lambda: not is_running(left), "it has ended")
