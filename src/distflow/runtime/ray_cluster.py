"""The Ray that a run's workers are on: connected to, or started and ended again; and the room they take there."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from distflow.config.errors import UserError
from distflow.planning.plan import Plan
from distflow.planning.threads import usable_cores
from distflow.runtime.ray_guard import Process as Started
from distflow.runtime.ray_guard import descendants, kill_those

STARTS_WITHIN_S = 120.0
ENDS_WITHIN_S = 20.0
_RAYLET, _GCS = "raylet", "gcs_server"
_SAYS_AFTER_S = 5.0
Process = Popen[Any]
_CONNECTS_WITHIN_S = 10.0
_WORKER_BYTES = 350e6
"""Of a worker that has imported everything and holds no model yet."""


class RayFailed(RuntimeError):
    """The Ray of this process's own could not be started."""


@contextmanager
def connected(plan: Plan, say: Callable[[str], None]) -> Iterator[bool]:
    """Inside, this process drives a Ray: the one that RAY_ADDRESS names or that it is connected to already, else one of
    its own on loopback, which ends with the block, and all that runs there with it: whether it is that."""
    if ray.is_initialized():
        yield False
        return
    if address := os.environ.get("RAY_ADDRESS"):
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as err:  # not there, no token, or other versions
            raise UserError(f"the Ray that RAY_ADDRESS={address} names cannot be used: {err}") from err
        try:
            yield False
        finally:
            ray.shutdown()
        return
    say(f"starting Ray for {len(plan.ranks)} workers on this machine")
    with started(len(plan.ranks)):
        yield True


@contextmanager
def started(num_workers: int) -> Iterator[None]:
    """A Ray of this machine with a CPU for each worker at least, which ends with the block."""
    try:
        ray.init(
            address="local",  # never one that somebody else has started here
            num_cpus=max(num_workers, usable_cores()),
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


def gone() -> str | None:
    """Which process of this one's own Ray is not there any more, for people; None where all are, or it has none."""
    return _named(_own_processes(), lambda process: process.poll() is not None, "has died")


def ailing() -> str | None:
    """The same, or which is stopped: what a worker that is gone may have died of."""
    return gone() or _named(_own_processes(), _is_stopped, "is stopped")


@contextmanager
def bundles_of(plan: Plan, say: Callable[[str], None], ends: bool) -> Iterator[PlacementGroup]:
    """One bundle a node of the plan, with a CPU, the device and the memory of each of its workers. Raises UserError
    where the cluster does not have them.

    ends: they need not be given back, as this Ray ends with the run: it may be what has failed.
    """
    nodes = sorted({rank.node for rank in plan.ranks})
    wanted = [_needs([rank.device for rank in plan.ranks if rank.node == node]) for node in nodes]
    group = placement_group(wanted, strategy="PACK" if len(nodes) == 1 else "STRICT_SPREAD")
    needs = f"{len(nodes)} machine(s) with {', '.join(map(_counted, wanted))}"
    try:
        _wait_for(group, say, needs, STARTS_WITHIN_S if _fits(wanted) else 0.0)
    except GetTimeoutError:
        remove_placement_group(group)
        have = "; ".join(_counted(node["Resources"]) for node in ray.nodes() if node["Alive"])
        raise UserError(
            f"the plan needs {needs}, and the cluster has {have}: lower trainer.nnodes, trainer.n_gpus_per_node or "
            "trainer.allocation, add machines, or end what else runs there"
        ) from None
    try:
        yield group
    finally:
        if not ends:
            remove_placement_group(group)


def _own_processes() -> dict[str, Process]:
    """By what Ray calls them; only those that a run needs."""
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
    """Ray asks its processes to end. One that is stopped hears of it as little as of any other question."""
    node = ray._private.worker._global_node
    known: Mapping[str, Sequence[Any]] = node.all_processes if node is not None else {}
    processes: list[Process] = [info.process for each in known.values() for info in each]

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


def _wait_for(group: PlacementGroup, say: Callable[[str], None], needs: str, timeout_s: float) -> None:
    """Raises GetTimeoutError."""
    ready = group.ready()
    if timeout_s and not ray.wait([ready], timeout=_SAYS_AFTER_S)[0]:
        say(f"waiting up to {timeout_s:g} s for {needs}: others hold them now")
    ray.get(ready, timeout=timeout_s)


def _check_reachable(address: str) -> None:
    """Raises UserError for a HOST:PORT where nobody listens: Ray itself tries for minutes, and says little."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:  # "auto", or another kind of address
        return
    try:
        socket.create_connection((host, int(port)), _CONNECTS_WITHIN_S).close()
    except OSError as err:
        raise UserError(
            f"nothing answers at RAY_ADDRESS={address}: {err}. It names the head of a cluster, as `ray start --head` "
            "prints it; without the variable a Ray is started on this machine"
        ) from err


def _needs(devices: Sequence[str]) -> dict[str, float]:
    num_gpus = sum(device.startswith("cuda") for device in devices)
    memory = {"memory": _WORKER_BYTES * len(devices)}
    return {"CPU": float(len(devices)), **({"GPU": float(num_gpus)} if num_gpus else {}), **memory}


def _fits(wanted: Sequence[Mapping[str, float]]) -> bool:
    """Whether the machines have as much at all, used or not."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = list(nodes)
    for need in wanted:
        found = next((node for node in free if all(node.get(name, 0) >= count for name, count in need.items())), None)
        if found is None:
            return False
        free.remove(found)
    return True


def _counted(resources: Mapping[str, float]) -> str:
    """For the user: memory is what Ray hands out, which is less than the machine has."""
    counts = [f"{int(resources[name])} {name}" for name in ("CPU", "GPU") if name in resources]
    return " and ".join([*counts, f"{resources.get('memory', 0) / 1e9:.1f} GB of memory"])
