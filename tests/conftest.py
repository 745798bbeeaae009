"""One thread for every test and its subprocesses: on few cores threads only fight, and results stay
the same."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# a shell's `pytest &` ignores it, and tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
# the same examples on any machine, however busy
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


def pytest_xdist_auto_num_workers() -> int:
    """Two a core: half of the time a test waits for a process, a deadline or a disk. 16 at most, of
    up to 1 GB each."""
    return min(2 * len(os.sched_getaffinity(0)), 16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes ten minutes comes first: at the end one process alone would be at it."""
    items.sort(key=lambda item: "test_docs_commands" not in item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Of what is collected nothing is garbage, so a fifth of the time is saved by not looking for
    it; and what ten thousand tests consist of stays to the end: no garbage collection looks at it
    again."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result
