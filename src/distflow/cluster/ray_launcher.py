"""The Ray launcher. It sets the environment that Ray reads on import, so modules that import Ray
are imported afterwards."""

import functools
import importlib.util
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distflow.errors import UserError
from distflow.launch.plan_concurrent_runs import Ended, PlannedRun, SeveralOptions
from distflow.launch.run_end import done_before
from distflow.launch.run_start import Start, starting
from distflow.observe.report.build import write_report
from distflow.planning.plan import Plan
from distflow.processes.survivors import survivors_ended
from distflow.runtime.run_recorder import reported
from distflow.runtime.spec import LAUNCH_DEFAULTS, LaunchOptions, Outcome, Spec, WorkerNeeds

if TYPE_CHECKING:
    from distflow.cluster.own_loop_driver import OwnLoop
    from distflow.cluster.ray_cluster import Bundle

NEEDED = "needs the extra: pip install 'distflow[ray]'"
_TOKEN = ".ray-token"


def launch_ray(spec: Spec, options: LaunchOptions = LAUNCH_DEFAULTS) -> Outcome:
    """See `Launch`. RAY_ADDRESS names the cluster; without it this process starts and ends its own
    Ray, unless it is already connected to one."""
    with _starting(spec, options.allow_change) as (spec, start):
        if done := done_before(spec, start, options.say):
            return done
        from distflow.cluster.supervisor import supervise

        with _bundles(spec, start, options.say) as bundles:
            return supervise(spec, start, bundles, options)


@contextmanager
def open_ray(
    spec: Spec, allow_change: tuple[str, ...], say: Callable[[str], None]
) -> "Iterator[OwnLoop]":
    """The run driven by a user's own loop: see `open_local`."""
    with _starting(spec, allow_change) as (spec, start):
        from distflow.cluster.own_loop_driver import OwnLoop, RemoteIntake, TrainingRanks
        from distflow.cluster.supervisor import RayRun

        with (
            _bundles(spec, start, say) as bundles,
            RayRun(spec, start, bundles, own_loop=True) as run,
            run.driven(run.build(say)) as progress,
        ):
            yield OwnLoop(TrainingRanks(spec, run, progress.version.step), RemoteIntake(run))

        write_report(spec.run_dir)


@contextmanager
def _starting(spec: Spec, allow_change: tuple[str, ...]) -> Iterator[tuple[Spec, Start]]:
    if not is_installed():
        raise UserError(f"trainer.launcher=ray {NEEDED}")
    # actors start elsewhere
    spec = replace(spec, run_dir=spec.run_dir.absolute())
    with starting(spec, allow_change) as start, _private_ray(spec.run_dir):
        yield spec, start


@contextmanager
def _bundles(spec: Spec, start: Start, say: Callable[[str], None]) -> "Iterator[dict[int, Bundle]]":
    """Ray, with a bundle for each node of the run."""
    from distflow.cluster.ray_cluster import bundles_of, connect_ray

    start.set_aside(spec, say)
    with (
        connect_ray(spec.plan, say) as ends,
        bundles_of(spec.plan, spec.needs, say, ends) as bundles,
        reported(spec.run_dir, say),
    ):
        yield bundles


@contextmanager
def ray_for(
    plan: Plan, needs: WorkerNeeds, folder: Path, say: Callable[[str], None]
) -> "Iterator[dict[int, Bundle]]":
    """Ray for a server, with a bundle for each node of the plan. folder: of the server. Raises
    UserError."""
    if not is_installed():
        raise UserError(f"trainer.launcher=ray {NEEDED}")

    with _private_ray(folder):
        from distflow.cluster.ray_cluster import bundles_of, connect_ray

        with connect_ray(plan, say) as ends, bundles_of(plan, needs, say, ends) as bundles:
            yield bundles


def gpus_of_machines() -> list[int]:
    """Ray's count of GPUs on each machine of the cluster that RAY_ADDRESS names or that this
    process is connected to; else those of this machine, on which a Ray would be started. Raises
    UserError without Ray."""
    if not is_installed():
        raise UserError(f"trainer.launcher=ray {NEEDED}")
    if not os.environ.get("RAY_ADDRESS") and not _is_connected():
        return [torch.cuda.device_count()]

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from distflow.cluster.ray_cluster import joined_ray, ray

    with nullcontext() if _is_connected() else joined_ray(os.environ["RAY_ADDRESS"]):
        return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


def launch_several_ray(runs: Sequence[PlannedRun], options: SeveralOptions) -> Ended:
    """As `launch_several`, on one Ray, found as in `launch_ray`."""
    if not is_installed():
        raise UserError(f"trainer.launcher=ray {NEEDED}")

    with tempfile.TemporaryDirectory(prefix="distflow-") as folder, _private_ray(Path(folder)):
        from ray import get_runtime_context

        from distflow.cluster.concurrent_run_processes import RunProcesses
        from distflow.cluster.ray_cluster import (
            SHARED_BUNDLES,
            connect_ray,
            failed_process,
            reserve,
        )

        plan = Plan(
            ", ".join(run.name for run in runs),
            tuple(chain.from_iterable(run.plan.ranks for run in runs)),
            (),
        )

        say = options.say
        with (
            connect_ray(plan, say) as ends,
            reserve(plan, runs[0].needs, say, ends) as bundles,
        ):
            joins = {
                "RAY_ADDRESS": get_runtime_context().gcs_address,
                SHARED_BUNDLES: bundles.id.hex(),
            }
            with RunProcesses(runs, {run.name: joins for run in runs}, options) as processes:
                return processes.watch(failed_process)


def is_installed() -> bool:
    """Whether Ray can be imported."""
    return importlib.util.find_spec("ray") is not None


@contextmanager
def own_ray(folder: Path, num_workers: int) -> Iterator[None]:
    """A Ray on this machine for all runs inside with at most this many workers, ignoring
    RAY_ADDRESS; or the one that this process is already connected to."""
    if _is_connected():
        yield
        return

    address = os.environ.pop("RAY_ADDRESS", None)
    try:
        with _private_ray(folder):
            from distflow.cluster.ray_cluster import start_ray

            with start_ray(num_workers):
                yield
    finally:
        if address is not None:
            os.environ["RAY_ADDRESS"] = address


@contextmanager
def _private_ray(folder: Path) -> Iterator[None]:
    """A Ray that is started inside listens only on loopback, and rejects clients without a token in
    `folder` that only this user can read. A running one has its own settings."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" in os.environ or _is_connected():
        yield
        return

    # Despite its name: when off, Ray keeps the address that it gets, including loopback.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

    # What a user's code started in a worker ends with the worker.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "1")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / _TOKEN
    with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(_secret())
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    _read_again()

    try:
        # some of Ray's helpers look for their parent only now and then
        with survivors_ended():
            yield
    finally:
        token.unlink(missing_ok=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

        _read_again()


def _read_again() -> None:
    """Make an already imported Ray reread its settings."""
    if "ray" in sys.modules:
        from ray import _raylet as compiled

        compiled.Config.initialize("")  # type: ignore[attr-defined]
        compiled.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


@functools.cache
def _secret() -> str:
    """The token for every Ray of this process: Ray reads it once, and would reject a second one."""
    return secrets.token_hex(32)


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
