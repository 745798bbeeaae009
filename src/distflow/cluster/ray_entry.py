"""The Ray launcher. It sets the environment that Ray reads when it is imported, so modules that import Ray are imported
after that."""

import functools
import importlib.util
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import UserError
from distflow.launch.run_setup import Start, done_before, outcome_of, starting
from distflow.observe.report.build import write_report
from distflow.runtime.checkpoint.save_and_restore import check_same_facts
from distflow.runtime.recorder import reported
from distflow.runtime.spec import Outcome, Spec
from distflow.runtime.user_calls.sync_calls import Callbacks

if TYPE_CHECKING:
    from distflow.cluster.own_loop import OwnLoop
    from distflow.cluster.supervisor import RayRun

NEEDED = "needs the extra: pip install 'distflow[ray]'"
_TOKEN = ".ray-token"


def launch_ray(
    spec: Spec,
    *,
    allow_change: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008  immutable
    embedded: bool = False,
) -> Outcome:
    """See `Launch`. RAY_ADDRESS names the cluster; without it this process starts a Ray of its own and ends it, if it
    is not connected to one already."""
    with _starting(spec, allow_change) as (spec, start):
        if done := done_before(spec, start, say):
            return done
        with _built(spec, start, say) as (run, differences):
            steps, stop = run.watch(differences, callbacks, ends_process=not embedded)
        return outcome_of(spec, steps, stop.signal, stopped=stop.wanted and not run.finished)


@contextmanager
def open_ray(spec: Spec, say: Callable[[str], None]) -> "Iterator[OwnLoop]":
    """The same run, driven by the caller: see `open_local`."""
    with _starting(spec, ()) as (spec, start):
        with _built(spec, start, say, own_loop=True) as (run, differences), run.driven(differences) as progress:
            from distflow.cluster.own_loop import OwnLoop, RemoteIntake, TrainingRanks

            yield OwnLoop(TrainingRanks(spec, run, progress.version.step), RemoteIntake(run))
        write_report(spec.run_dir)


@contextmanager
def _starting(spec: Spec, allow_change: tuple[str, ...]) -> Iterator[tuple[Spec, Start]]:
    if not is_installed():
        raise UserError(f"trainer.launcher=ray {NEEDED}")
    spec = replace(spec, options=replace(spec.options, run_dir=spec.run_dir.absolute()))  # actors start elsewhere
    with starting(spec, allow_change) as start, _private_ray(spec.run_dir):
        if start.checkpoint:
            check_same_facts(start.checkpoint, spec, spec.facts)
        yield spec, start


@contextmanager
def _built(
    spec: Spec, start: Start, say: Callable[[str], None], own_loop: bool = False
) -> "Iterator[tuple[RayRun, list[str]]]":
    """The actors of a run with their engines, and the harmless differences from the checkpoint."""
    from distflow.cluster.ray_cluster import bundles_of, connect_ray
    from distflow.cluster.supervisor import RayRun

    start.set_aside(spec, say)
    needs = spec.options.worker
    with (
        connect_ray(spec.plan, say, needs.num_reward_actors * needs.reward_cpus) as ends,
        bundles_of(spec.plan, needs, say, ends) as bundles,
        reported(spec.run_dir, say),
        RayRun(spec, start, bundles, own_loop) as run,
    ):
        yield run, run.build(say)


def is_installed() -> bool:
    """Whether there is a Ray to import."""
    return importlib.util.find_spec("ray") is not None


@contextmanager
def own_ray(folder: Path, num_workers: int) -> Iterator[None]:
    """A Ray on this machine for all runs inside with at most so many workers, whatever RAY_ADDRESS names; or the one
    that this process is connected to already."""
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
    """A Ray that is started inside listens on loopback alone, and rejects clients without a token in `folder` that only
    this user can read. One that runs already has its own settings."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" in os.environ or _is_connected():
        yield
        return
    # Despite its name: with it off, Ray keeps the address that it gets, loopback included.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / _TOKEN
    with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(_secret())
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    _read_again()
    guard = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("reaper.py")), str(token), str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a signal to the driver's process group does not reach it
    )
    try:
        yield
    finally:
        guard.communicate(b".")
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    """Make a Ray that was imported before read its settings again."""
    if "ray" in sys.modules:
        from ray import _raylet as compiled

        compiled.Config.initialize("")  # type: ignore[attr-defined]
        compiled.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


@functools.cache
def _secret() -> str:
    """One token for every Ray of this process: Ray reads it once, and would reject a second one."""
    return secrets.token_hex(32)


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
