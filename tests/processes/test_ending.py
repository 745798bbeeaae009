"""The end of a process in which a user's code has left something."""

import signal
import subprocess
import sys

import pytest

from tests.patience import is_running, wait_until

LEAVES = {
    "popen": "import subprocess; left = subprocess.Popen(['sleep', '600']).pid",
    "process": """
import multiprocessing
process = multiprocessing.Process(target=time.sleep, args=(600,))
process.start()
left = process.pid
""",
    "executor": """
from concurrent.futures import ProcessPoolExecutor
pool = ProcessPoolExecutor(1)
left = pool.submit(os.getpid).result()
pool.submit(time.sleep, 600)
""",
    "thread": "threading.Thread(target=time.sleep, args=(600,)).start(); left = 0",
}
PROCESS = """
import os, sys, threading, time
from distflow.processes.ending import end_users_processes_at_exit, exit_soon
end_users_processes_at_exit()
{code}
print(left, flush=True)
exit_soon(5)
sys.exit(5)
"""
COMMAND = """
import subprocess, sys, threading, time
from distflow import __main__, cli

def command():
    print(subprocess.Popen(['sleep', '600']).pid, flush=True)
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 0

cli.main = command
sys.exit(__main__.main())
"""


@pytest.mark.parametrize(
    "kind", ["popen", *(pytest.param(each, marks=pytest.mark.slow) for each in [*LEAVES][1:])]
)
def test_it_ends_with_its_status_and_nothing_is_left(kind):
    command = [sys.executable, "-c", PROCESS.format(code=LEAVES[kind])]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 5
    left = int(ended.stdout)
    wait_until(lambda: not left or not is_running(left), "nothing is left")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_ends_leaves_nothing(number):
    """As a second Ctrl-C, after the command has returned."""
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        process.send_signal(number)
    assert process.returncode == 128 + number
    wait_until(lambda: not is_running(left), "nothing is left")
