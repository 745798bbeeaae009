"""How OpenMP threads wait, in processes of their own: libgomp reads the environment when it is
loaded."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from distflow.runtime.shared_cores import Look, are_wanted, own_s

WATCHED = """
import threading
{first}
from distflow.runtime.resources import Resources
from distflow.runtime.rollout_loop.rollout_services import RolloutServices
with RolloutServices(Resources(None, (), {{}}, None), None):
    print([thread.name for thread in threading.enumerate() if thread.name == "shared-cores"])
"""

SWITCHED = """
from distflow.runtime.shared_cores import SharedCores, _find_start_team
import torch
from tests.runtime.test_shared_cores import spun_ns
torch.set_num_threads(2)
cores, start_team = SharedCores(), _find_start_team()
free = spun_ns()
cores.sleep(start_team)
wanted = spun_ns()
cores.spin()
again = spun_ns()
print(free, wanted, again)
"""


def spun_ns() -> int:
    """The processor time of all other threads of this process for one small operation, the least of
    several tries."""
    import threading
    import time

    import torch

    def used() -> int:
        own = str(threading.get_native_id())
        total = 0
        for task in os.listdir("/proc/self/task"):
            if task != own:
                with suppress(OSError):  # it has ended meanwhile
                    figures = Path(f"/proc/self/task/{task}/schedstat").read_text()
                    total += int(figures.split()[0])

        return total

    x = torch.ones(2**18)
    tries = []
    for _ in range(5):
        before = used()
        x.add_(1)
        time.sleep(0.05)
        tries.append(used() - before)

    return min(tries[1:])


def output(code: str, **variables: str) -> str:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")
    }
    environment = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}

    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_threads_sleep_between_operations_while_others_want_the_cores_and_spin_again_afterwards():
    free, wanted, again = map(int, output(SWITCHED).split())
    assert 10 * wanted < free and 10 * wanted < again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "first", "watched"),
    [
        ({}, "", True),
        ({}, "import torch", True),  # as in a notebook
        ({"OMP_WAIT_POLICY": "active"}, "", False),
        ({"GOMP_SPINCOUNT": "100"}, "", False),
    ],
)
def test_a_worker_watches_the_cores_unless_the_user_chose_how_threads_wait(
    variables, first, watched
):
    assert output(WATCHED.format(first=first), **variables).strip() == str(
        ["shared-cores"] if watched else []
    )


def look(waited_s: float, busy_s: float, own_s: float) -> Look:
    return Look({1: int(waited_s * 1e9)}, busy_s, own_s)


START = look(7.0, 100.0, 50.0)


@pytest.mark.parametrize(
    ("what", "now", "wanted"),
    [
        ("another program beside two threads", look(7.8, 102.0, 51.2), True),
        ("three of them", look(8.5, 102.0, 50.8), True),
        ("alone, one thread for each core", look(7.02, 102.0, 52.0), False),
        ("alone, a burst of threads that load data", look(9.5, 102.0, 51.95), False),
        ("alone, reward processes of the run", look(8.2, 102.0, 52.0), False),
        ("another program, but cores enough", look(7.1, 103.5, 52.0), False),
    ],
)
def test_others_want_the_cores_if_threads_wait_for_them_and_not_for_each_other(what, now, wanted):
    assert are_wanted(START, now, 1.0) == wanted, what


def test_a_thread_that_was_not_there_before_tells_nothing():
    now = Look({1: 7 * 10**9, 3: 10**12}, 102.0, 50.0)
    assert not are_wanted(START, now, 1.0)


def test_processes_that_this_one_started_are_its_own_whether_they_run_or_have_ended():
    work = "import time\nwhile time.process_time() < 0.15: pass\nprint(flush=True)\ninput()"
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}])"
    before = own_s(os.getpid())

    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", inner], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        running = own_s(os.getpid()) - before
        process.stdin.write(b"\n")

    assert running > 0.12
    assert own_s(os.getpid()) - before >= running
