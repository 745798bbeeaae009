"""A Ray of this process's own: starts it, watches it, and ends it with all that runs there."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import ray
from ray._private import services

from distflow.cluster.reaper import Process as Started
from distflow.cluster.reaper import descendants, kill_those
from distflow.planning.threads import usable_cores

ENDS_WITHIN_S = 20.0
_RAYLET, _GCS = "raylet", "gcs_server"
Process = Popen[Any]


class RayFailed(RuntimeError):
    """The Ray of this process's own could not be started."""


@contextmanager
def started(num_cpus: int) -> Iterator[None]:
    """A Ray of this machine with so many CPUs at least, which ends with the block."""
    try:
        with _own_process_groups():
            ray.init(
                address="local",  # never one that another process has started here
                num_cpus=max(num_cpus, usable_cores()),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
    except Exception as err:  # Ray raises no type of its own
        raise RayFailed(f"no Ray could be started on this machine: {err}") from err
    try:
        yield
    finally:
        _end_own()


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """What Ray starts inside gets process groups of its own: a signal to ours, as `timeout` sends it, must reach the
    run alone, which saves before its Ray ends."""
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


def gone() -> str | None:
    """Names a process of this one's own Ray that has died; None where none has, or there is no such Ray."""
    return _named(_own_processes(), lambda process: process.poll() is not None, "has died")


def ailing() -> str | None:
    """The same, or one that is stopped: a worker may have died of it."""
    return gone() or _named(_own_processes(), _is_stopped, "is stopped")


def _own_processes() -> dict[str, Process]:
    """By Ray's names for them; only those that a run needs."""
    node = ray._private.worker._global_node
    found: Mapping[str, Sequence[Any]] = node.all_processes if node is not None else {}
    return {kind: info.process for kind in (_RAYLET, _GCS) for info in found.get(kind, ())}


def _named(processes: Mapping[str, Process], ails: Callable[[Process], bool], how: str) -> str | None:
    return next((f"Ray's {kind} (pid {each.pid}) {how}" for kind, each in processes.items() if ails(each)), None)


def _is_stopped(process: Process) -> bool:
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, or this is no Linux
        return False


def _end_own() -> None:
    """Ray asks its processes to end; one that is stopped cannot, and is killed."""
    node = ray._private.worker._global_node
    found: Mapping[str, Sequence[Any]] = node.all_processes if node is not None else {}
    processes: list[Process] = [info.process for each in found.values() for info in each]
    below = set[Started]().union(*(descendants(process.pid) for process in processes))

    def kill() -> None:
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)
        kill_those(below)

    if any(map(_is_stopped, processes)):
        kill()
    late = threading.Timer(ENDS_WITHIN_S, kill)
    late.start()
    ray.shutdown()
    late.cancel()
