"""What is expensive to make, made by one of the processes of pytest-xdist and used by all of
them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` filled. Tests must leave it as it is. make: gets an empty folder;
    where it failed in another process, it is called again with a new one."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with (root / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if found := lock.read():
            return Path(found)

        folder = factory.mktemp(name)
        make(folder)
        lock.write(str(folder))

    return folder
