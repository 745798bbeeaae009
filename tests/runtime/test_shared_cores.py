"""How OpenMP threads wait, in processes of their own: libgomp reads the environment when it is
loaded."""

import os
import subprocess
import sys

import pytest

from distflow.runtime.shared_cores import WANTED, are_wanted

WATCHED = """
import threading
{first}
from distflow.runtime.engines_and_services import Resources
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
        others = [task for task in os.listdir("/proc/self/task") if task != own]
        return sum(
            int(open(f"/proc/self/task/{task}/schedstat").read().split()[0]) for task in others
        )

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
def test_threads_sleep_between_operations_while_others_want_the_cores_and_spin_again_afterwards() -> (  # noqa: E501
    None
):
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
    variables: dict[str, str], first: str, watched: bool
) -> None:
    assert output(WATCHED.format(first=first), **variables).strip() == str(
        ["shared-cores"] if watched else []
    )


def test_others_want_the_cores_if_threads_waited_for_them_long_enough() -> None:
    before = {1: 5, 2: 0}
    assert not are_wanted(before, {1: 5 + int(WANTED * 0.9e9), 2: 0}, 1.0)
    assert are_wanted(before, {1: 5 + int(WANTED * 0.6e9), 2: int(WANTED * 0.6e9)}, 1.0)
    assert not are_wanted(before, {1: 5, 3: 10**12}, 1.0), (
        "a thread that was not there before tells nothing"
    )
