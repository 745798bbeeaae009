"""The actors of a run, watched by the process that started them."""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distflow import __version__
from distflow.config.errors import UserError
from distflow.observe.terminal import TerminalView
from distflow.planning.plan import learning_teams
from distflow.planning.threads import usable_cores
from distflow.runtime.begin import Start, model_line, open_store
from distflow.runtime.callbacks import Callbacks, Caller
from distflow.runtime.engine_watch import STACKS
from distflow.runtime.ray_coordinator import CoordinatorActor, News
from distflow.runtime.ray_exchange import ExchangeActor
from distflow.runtime.ray_worker import Built, Home, Place, WorkerActor
from distflow.runtime.saved import check_same_facts
from distflow.runtime.spec import Spec
from distflow.runtime.stop import StopRequest
from distflow.runtime.teams import edge_team

ANSWERS_WITHIN_S = 60.0
ENDS_WITHIN_S = 20.0
_LOOKS_EVERY_S = 0.5
_SHARE_OF_STORE = 0.5
_MB = 10**6
_NUM_CALLS = 6  # of a worker that may wait at once: tickets, a step, its end, news, the pulse


_THERE = (
    "If it is there for the process that starts the run: have it on every machine, at the same path or installed, "
    "modules on the PYTHONPATH with which Ray was started there"
)


class WorkerFailed(RuntimeError):
    """A worker raised before the run began, and nothing that the user gave is to blame."""


class WorkerDied(RuntimeError):
    """A worker's process is gone: the run ends, and goes on from its last checkpoint when it is started again."""


class RayRun:
    """The actors of a run: made, watched to the end, and killed."""

    def __init__(self, spec: Spec, start: Start, allowed: tuple[str, ...], bundles: PlacementGroup) -> None:
        self._spec, self._start = spec, start
        ranks, max_held_bytes = spec.plan.ranks, bound_of(spec)
        spec = replace(spec, data=replace(spec.data, max_held_bytes=max_held_bytes))
        teams = learning_teams(spec.plan)
        generators = tuple(rank.rank for rank in ranks if rank.experience)
        meeting = spec.run_dir / f".meeting-{secrets.token_hex(4)}"
        self._meeting = meeting
        calls = _NUM_CALLS * len(ranks) + _NUM_CALLS
        self._coordinator: Any = (  # Ray's handles have no types
            ray.remote(CoordinatorActor)
            .options(num_cpus=0, max_concurrency=calls)
            .remote(spec, start, allowed, [edge_team(spec, team) for team in teams], [str(rank) for rank in generators])
        )
        exchanges = any(channel.kind == "exchange" for channel in spec.plan.channels)
        self._exchange = cast(Any, ExchangeActor).remote(max_held_bytes) if exchanges else None
        self._workers: list[Any] = []
        nodes = sorted({rank.node for rank in ranks})
        for rank in ranks:
            beside = sum(other.node == rank.node for other in ranks)
            threads = spec.config.trainer.num_threads or max(1, usable_cores() // beside)
            place = Place(rank.rank, teams, generators, threads, Home.of_driver())
            where = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=nodes.index(rank.node))
            self._workers.append(
                ray.remote(WorkerActor)
                .options(
                    num_cpus=1,
                    num_gpus=int(rank.device.startswith("cuda")),
                    scheduling_strategy=where,
                    max_concurrency=_NUM_CALLS,
                )
                .remote(spec, place, self._coordinator, meeting, self._exchange)
            )
        self._learners = [rank for team in teams for rank in team]
        self._others = [rank for rank in generators if rank not in self._learners]
        self.finished = False

    def build(self, say: Callable[[str], None]) -> list[str]:
        """Engines and services of all workers; what differs from the checkpoint without harm."""
        built: list[Built] = self._all([worker.build.remote() for worker in self._workers])
        for rank, each in enumerate(built):
            if each.version != __version__:
                raise UserError(
                    f"worker {rank} has distflow {each.version}, and this process {__version__}: install the same on "
                    "every machine"
                )
        leader = built[self._learners[0]]
        say(model_line(self._spec, leader.num_parameters))
        facts = {**self._spec.facts, **leader.facts}
        return check_same_facts(self._start.checkpoint, self._spec, facts) if self._start.checkpoint else []

    def watch(self, differences: list[str], callbacks: Callbacks, ends_process: bool) -> tuple[int, StopRequest]:
        """Until the run has ended; the steps consumed in all. Raises what a worker raised first."""
        options, leader = self._spec.options, self._learners[0]
        others = [self._workers[rank] for rank in self._others]
        standing = ray.get(self._coordinator.standing.remote())
        view = TerminalView(f"{options.project} / {options.experiment}", standing.total_steps)
        pulse = Pulse(
            [*self._workers, self._coordinator],
            [*(f"worker {r}" for r in range(len(self._workers))), "the coordinator"],
        )
        told = _Told(view, Caller(callbacks, lambda message: view.note("warning", message)))

        def asked_to_stop(name: str) -> None:
            view.note("info", f"{name}: finishing this step, then leaving; a second time leaves at once")
            self._coordinator.stop.remote()

        with StopRequest(asked_to_stop, ends_process=ends_process) as stop:
            running = {
                worker.run.remote(self._start, differences, others if rank == leader else []): rank
                for rank, worker in enumerate(self._workers)
            }
            learning = {ref for ref, rank in running.items() if rank in self._learners}
            steps = 0
            try:
                while learning:
                    told.show(self._coordinator)
                    if silent := pulse.silent():
                        raise WorkerDied(self._silence(silent))
                    done, _ = ray.wait(list(running), num_returns=1, timeout=0)
                    for ref in done:
                        steps = max(steps, self._result(ref, running.pop(ref)))
                        learning.discard(ref)
                self._coordinator.end.remote()
                for ref, rank in running.items():
                    self._result(ref, rank, ENDS_WITHIN_S)
                self.finished = bool(ray.get(self._coordinator.standing.remote()).finished)
                told.show(self._coordinator, wait_s=0.0)
            finally:
                view.close()
        return steps, stop

    def kill(self) -> None:
        """No process of the run is left."""
        actors = [*self._workers, self._coordinator, *([self._exchange] if self._exchange is not None else [])]
        for actor in actors:
            with suppress(Exception):  # it is gone already
                ray.kill(actor)
        self._meeting.unlink(missing_ok=True)

    def _result(self, ref: Any, rank: int, timeout_s: float | None = None) -> int:
        try:
            return int(ray.get(ref, timeout=timeout_s))
        except RayTaskError as err:
            raise err.cause from err
        except RayActorError as err:
            raise self._died(rank, "while the run was under way", err) from err

    def _died(self, rank: int, when: str, err: RayActorError) -> WorkerDied | WorkerFailed:
        if err.actor_init_failed:  # by an exception, which is all that Ray tells of it
            said = str(err).strip().splitlines()[-1]
            return WorkerFailed(f"{self._who(rank, err)} could not be started: {said}")
        plan = self._spec.plan.ranks[rank]
        does = " and ".join(
            name for name, nodes in (("generates", plan.experience), ("trains", plan.learning)) if nodes
        )
        pid = next((line.strip() for line in str(err).splitlines() if line.strip().startswith("pid:")), "pid: unknown")
        return WorkerDied(
            f"worker {rank} of {len(self._workers)}, which {does}, has died {when} ({pid}): killed from outside, out "
            f"of memory, or crashed in native code. {_goes_on(self._spec)}"
        )

    def _unbuilt(self, rank: int, err: RayTaskError) -> Exception:
        """What a worker raised before the run began. Its traceback is in `err`, which `--debug` shows."""
        who = self._who(rank, err)
        if isinstance(err.cause, UserError):
            return UserError(f"{who}: {err.cause}\n{_THERE}")
        return WorkerFailed(f"{who} could not build its engines: {type(err.cause).__name__}: {err.cause}")

    def _who(self, rank: int, err: Exception) -> str:
        """With the process, as Ray's own text has it."""
        where = re.search(r"pid=(\d+), ip=([^,)]+)", str(err))
        process = f" (pid {where[1]} on {where[2]})" if where else ""
        return f"worker {rank} of {len(self._workers)}{process}"

    def _silence(self, silent: str) -> str:
        """Every process that still answers writes what its threads are at."""
        stacks = self._spec.run_dir / STACKS
        asked = [worker.write_stacks.remote(stacks) for worker in self._workers]
        ray.wait(asked, num_returns=len(asked), timeout=ENDS_WITHIN_S)
        return (
            f"{silent} has not answered for {ANSWERS_WITHIN_S:g} s: its process is stopped, hangs in native code, or "
            f"its machine is gone. What the others were at stands in {stacks}. {_goes_on(self._spec)}"
        )

    def _all(self, refs: Sequence[Any]) -> list[Any]:
        """In order; what fails first is raised at once."""
        waiting, ranks = list(refs), {ref: rank for rank, ref in enumerate(refs)}
        while waiting:
            done, waiting = ray.wait(waiting)
            for ref in done:
                try:
                    ray.get(ref)
                except RayTaskError as err:
                    raise self._unbuilt(ranks[ref], err) from err
                except RayActorError as err:
                    raise self._died(ranks[ref], "while its engines were built", err) from err
        return ray.get(list(refs))


def bound_of(spec: Spec) -> int:
    """Bytes that may wait in shared memory. Groups may all lie on one machine: the smallest object store counts."""
    if spec.options.max_held_mb is not None:
        return spec.options.max_held_mb * _MB
    stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]]
    return int(_SHARE_OF_STORE * min(store for store in stores if store))


def _goes_on(spec: Spec) -> str:
    store = open_store(spec)
    where = store.load().path.name if store.exists() else "the start: nothing was saved yet (trainer.save_freq)"
    return f"The same command goes on from {where}"


class Pulse:
    """Whether processes answer, asked one question after another on a thread that does nothing else."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str]) -> None:
        self._actors, self._names = actors, names
        self._asked = [(actor.alive.remote(), time.monotonic()) for actor in actors]

    def silent(self) -> str | None:
        """The name of one that has not answered for `ANSWERS_WITHIN_S`, if there is one."""
        for place, (ref, since) in enumerate(self._asked):
            if ray.wait([ref], timeout=0)[0]:
                self._asked[place] = (self._actors[place].alive.remote(), time.monotonic())
            elif time.monotonic() - since > ANSWERS_WITHIN_S:
                return self._names[place]
        return None


class _Told:
    """What workers tell, on the driver's screen and to the user's functions."""

    def __init__(self, view: TerminalView, caller: Caller) -> None:
        self._view = view
        self._callers: dict[str, Callable[..., None]] = {
            "on_step": caller.step,
            "on_validation": caller.validation,
            "on_save": caller.save,
        }

    def show(self, coordinator: Any, wait_s: float = _LOOKS_EVERY_S) -> None:
        for method, arguments in self._news(coordinator, wait_s):
            tell: Callable[..., None] = self._callers.get(method) or getattr(self._view, method)
            tell(*arguments)

    def _news(self, coordinator: Any, wait_s: float) -> list[News]:
        try:
            found: list[News] = ray.get(coordinator.news.remote(wait_s), timeout=ANSWERS_WITHIN_S + wait_s)
        except (RayActorError, GetTimeoutError) as err:
            raise WorkerDied(f"the coordinator's process is gone or does not answer: {type(err).__name__}") from err
        return found
