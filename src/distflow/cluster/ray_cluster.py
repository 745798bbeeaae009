"""The Ray of a run: connects to one, or starts one that ends with the run, and reserves resources
for the workers."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from subprocess import Popen
from typing import Any

import ray
from ray._private import services
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Bundle

from distflow.cluster.remote_calls import ENDS_WITHIN_S
from distflow.errors import RayNotStarted, UserError, count_of
from distflow.launch.threads import check_cores, usable_cores
from distflow.observe.writing.timing import lasting
from distflow.planning.plan import Plan, RankPlan
from distflow.processes.child import keep_exit_statuses
from distflow.processes.descendants import Process, descendants, kill_those
from distflow.runtime.spec import Spec, WorkerNeeds

PLACED_WITHIN_S = 120.0
_SAYS_AFTER_S = 5.0
_CONNECTS_WITHIN_S = 10.0
_WORKER_BYTES = 350e6
"""Memory of a worker that has imported everything, without a model."""
_TOKEN_ADVICE = (
    ". It requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the "
    "cluster's token (docs/cluster.md), as for `ray start`"
)
_SHARE_OF_STORE = 0.5
_MB = 10**6
_NEEDED = ("raylet", "gcs_server")
"""Ray's names for its processes that a run needs."""
SHARED_BUNDLES = "DISTFLOW_SHARED_BUNDLES"
"""An environment variable: the placement group that the parent process reserved, with a bundle per
node."""


@contextmanager
def connect_ray(plan: Plan, say: Callable[[str], None]) -> Iterator[bool]:
    """Connect this process to the Ray that RAY_ADDRESS names or that it is already connected to,
    else to its own one on loopback, which ends with the block and everything that runs there.
    Yields whether it is its own."""
    if ray.is_initialized():
        yield False
        return
    if address := os.environ.get("RAY_ADDRESS"):
        with joined_ray(address):
            yield False
        return

    check_room(plan)
    say(f"starting Ray for {count_of(len(plan.ranks), 'worker')} on this machine")

    with ExitStack() as stack:
        with lasting(say, "starting Ray"):
            stack.enter_context(start_ray(len(plan.ranks)))
        yield True


@contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Connect this process to the Ray that RAY_ADDRESS names. Raises UserError if it cannot be
    used."""
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    # not running, no token, or other versions
    except (ConnectionError, RuntimeError, ValueError) as err:
        token = ""
        if "InvalidAuthToken" in str(err.__cause__):
            token = _TOKEN_ADVICE
        raise UserError(f"the Ray at RAY_ADDRESS={address} cannot be used: {err}{token}") from err

    keep_exit_statuses()
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def start_ray(num_cpus: int) -> Iterator[None]:
    """Start a Ray on this machine with at least this many CPUs; it ends with the block."""
    # Ray's processes get their own process groups: a signal to ours, e.g. from `timeout`, must
    # reach only the run, which saves before its Ray ends.
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[misc,assignment]

    try:
        ray.init(
            address="local",  # never one that another process started here
            num_cpus=max(num_cpus, usable_cores()),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
    except Exception as err:  # Ray has no specific error type
        raise RayNotStarted(f"Ray could not be started on this machine: {err}") from err
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]

    keep_exit_statuses()
    try:
        yield
    finally:
        _end_own()


def failed_process() -> str | None:
    """Names a dead process of the Ray that this process started; None if all live or it started no
    Ray."""
    for kind, process in _own_processes():
        if kind in _NEEDED and process.poll() is not None:
            return f"Ray's {kind} (pid {process.pid}) has died"
    return None


def _own_processes() -> list[tuple[str, "Popen[Any]"]]:
    """The processes of this process's own Ray, with Ray's names for them."""
    node = ray._private.worker._global_node
    if node is None:
        return []

    processes = []
    for kind, infos in node.all_processes.items():
        processes += [(kind, info.process) for info in infos]
    return processes


def _end_own() -> None:
    """End our Ray, which asks its processes to end; stopped ones cannot, and are killed."""
    node = ray._private.worker._global_node
    below = set[Process]()
    for _, process in _own_processes():
        below.update(descendants(process.pid))

    def kill() -> None:
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=False)
        kill_those(below)

    late = threading.Timer(ENDS_WITHIN_S, kill)
    late.start()
    ray.shutdown()
    late.cancel()


@contextmanager
def bundles_of(
    plan: Plan, each: WorkerNeeds, say: Callable[[str], None], ends: bool
) -> Iterator[dict[int, Bundle]]:
    """The reserved bundle of each node of the plan, for this run alone, or shared by all runs that
    one command started. Raises what `reserve` raises."""
    nodes = sorted({rank.node for rank in plan.ranks})
    if shared := os.environ.get(SHARED_BUNDLES):
        group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(shared)))
        yield {node: Bundle(group, node) for node in nodes}
        return

    with reserve(plan, each, say, ends) as group:
        yield {node: Bundle(group, index) for index, node in enumerate(nodes)}


@contextmanager
def reserve(
    plan: Plan, each: WorkerNeeds, say: Callable[[str], None], ends: bool
) -> Iterator[PlacementGroup]:
    """Reserve one bundle per node of the plan, with the CPUs, the device and the memory of each of
    its workers. Raises UserError if the cluster lacks them.

    ends: this Ray ends with the run, so they are not released, since Ray itself may have failed.
    """
    nodes = sorted({rank.node for rank in plan.ranks})
    wanted = []
    for node in nodes:
        ranks = [rank for rank in plan.ranks if rank.node == node]
        wanted.append(_needs(ranks, each))

    strategy = "PACK" if len(nodes) == 1 else "STRICT_SPREAD"
    group = placement_group(wanted, strategy=strategy)
    try:
        bundles = [Bundle(group, number) for number in range(len(wanted))]
        timeout_s = PLACED_WITHIN_S if _fits(wanted) else 0.0
        wait_for_room(bundles, timeout_s, say)
        yield group
    finally:
        if not ends:
            remove_placement_group(group)


def wait_for_room(
    bundles: Collection[Bundle], timeout_s: float, say: Callable[[str], None]
) -> None:
    """Wait until each bundle has a machine that responds; Ray moves bundles of a lost machine.
    Raises UserError."""
    wanted = [
        each.placement_group.bundle_specs[each.placement_group_bundle_index] for each in bundles
    ]
    answer = ray.remote(lambda: None)  # pickled by value: it imports nothing there
    needs = f"{len(wanted)} machine(s) with {', '.join(map(_counted, wanted))}"
    ready = [
        answer.options(num_cpus=0, max_retries=-1, scheduling_strategy=each).remote()
        for each in bundles
    ]
    if timeout_s and ray.wait(ready, num_returns=len(ready), timeout=_SAYS_AFTER_S)[1]:
        say(f"waiting up to {timeout_s:g} s for {needs}: they are used by other jobs now")

    try:
        ray.get(ready, timeout=timeout_s)
    except GetTimeoutError:
        have = "; ".join(_counted(node["Resources"]) for node in ray.nodes() if node["Alive"])
        raise UserError(
            f"the plan needs {needs}, and the cluster has {have}: lower trainer.nnodes, "
            "trainer.n_gpus_per_node, trainer.allocation, trainer.worker_cpus or "
            "trainer.worker_memory_mb, add machines, or end other jobs"
        ) from None


def check_room(plan: Plan) -> None:
    """Raises UserError for a plan that does not fit on this machine, or would be hopelessly
    slow."""
    num_nodes = len({rank.node for rank in plan.ranks})
    if num_nodes > 1:
        raise UserError(
            f"the plan is for {num_nodes} machines (trainer.nnodes, trainer.allocation), and "
            "RAY_ADDRESS is not set: lower them, or run `ray start` on each machine and set "
            "RAY_ADDRESS to the head's HOST:PORT"
        )

    check_cores(plan, ", or set RAY_ADDRESS to a cluster")


def _check_reachable(address: str) -> None:
    """Raises UserError if nothing listens at HOST:PORT: Ray itself retries for minutes, with a
    vague message."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:  # "auto", or another kind of address
        return

    try:
        socket.create_connection((host, int(port)), _CONNECTS_WITHIN_S).close()
    except OSError as err:
        raise UserError(
            f"nothing answers at RAY_ADDRESS={address}: {err}. Set it to the head of a cluster, as "
            "printed by `ray start --head`, or unset it to start Ray on this machine"
        ) from err


def _needs(ranks: Sequence[RankPlan], each: WorkerNeeds) -> dict[str, float]:
    """The needs of these workers together. each: of one."""
    num_cpus = 0.0
    num_bytes = 0.0
    for rank in ranks:
        worker = each.of(rank)
        num_cpus += worker.cpus
        num_bytes += _WORKER_BYTES if worker.memory_mb is None else worker.memory_mb * _MB

    needs = {"CPU": num_cpus, "memory": num_bytes}
    num_gpus = sum(rank.device.startswith("cuda") for rank in ranks)
    if num_gpus:
        needs["GPU"] = float(num_gpus)
    return needs


def _fits(wanted: Sequence[Mapping[str, float]]) -> bool:
    """Whether there is a machine for each bundle, in use or not."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for need in wanted:
        for machine in machines:
            if all(machine.get(name, 0) >= count for name, count in need.items()):
                machines.remove(machine)
                break
        else:
            return False

    return True


def _counted(resources: Mapping[str, float]) -> str:
    """Resources in words. The memory is Ray's, which is less than the machine's."""
    counts = [f"{int(resources[name])} {name}" for name in ("CPU", "GPU") if name in resources]
    return " and ".join([*counts, f"{resources.get('memory', 0) / 1e9:.1f} GB of memory"])


def bound_of(spec: Spec) -> int:
    """Bytes that may wait in shared memory. All groups may be on one machine, so the smallest
    object store counts. A concurrent run gets its devices' share of it."""
    if spec.config.trainer.max_held_mb is not None:
        return spec.config.trainer.max_held_mb * _MB

    stores = [
        node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]
    ]
    trainer = spec.config.trainer
    of_devices = len(spec.plan.ranks) / (trainer.nnodes * trainer.n_gpus_per_node)

    return int(_SHARE_OF_STORE * of_devices * min(store for store in stores if store))
