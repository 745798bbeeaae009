"""The actors of a run, watched by the process that started them."""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from distflow.runtime.ray_cluster import ailing, gone
from distflow.runtime.ray_coordinator import CoordinatorActor, News, Standing
from distflow.runtime.ray_exchange import ExchangeActor
from distflow.runtime.ray_replace import (
    ANSWERS_WITHIN_S,
    STARTS_WITHIN_S,
    Replacements,
    WorkerDied,
    WorkerHangs,
    answer_of,
)
from distflow.runtime.ray_worker import Built, Home, PeersLate, Place, WorkerActor
from distflow.runtime.saved import check_same_facts
from distflow.runtime.spec import Spec
from distflow.runtime.stop import StopRequest
from distflow.runtime.teams import edge_team

ENDS_WITHIN_S = 20.0
COORDINATOR, EXCHANGE = -1, -2
"""In place of a rank."""
_LOOKS_EVERY_S = 0.5
_DEATHS_ARE_TOLD_WITHIN_S = 2.0
_SHARE_OF_STORE = 0.5
_MB = 10**6
_AWAY_S = 5.0
_CAUSES = "killed from outside, out of memory, or crashed in native code."
_NUM_CALLS = 6  # of a worker that may wait at once: tickets, a step, its end, news, the pulse


_THERE = (
    "If it is there for the process that starts the run: have it on every machine, at the same path or installed, "
    "modules on the PYTHONPATH with which Ray was started there"
)


class WorkerFailed(RuntimeError):
    """A worker raised before the run began, and nothing that the user gave is to blame."""


class RayRun:
    """The actors of a run: made, watched to the end, and killed."""

    def __init__(self, spec: Spec, start: Start, allowed: tuple[str, ...], bundles: PlacementGroup) -> None:
        self._spec, self._start = spec, start
        ranks, max_held_bytes = spec.plan.ranks, bound_of(spec)
        spec = replace(spec, data=replace(spec.data, max_held_bytes=max_held_bytes))
        teams = learning_teams(spec.plan)
        generators = tuple(rank.rank for rank in ranks if rank.experience)
        for left in spec.run_dir.glob(".meeting-*"):  # by a driver that was killed: the folder is this one's now
            left.unlink(missing_ok=True)
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
        self._bundles = bundles
        places = []
        for rank in ranks:
            beside = sum(other.node == rank.node for other in ranks)
            threads = spec.config.trainer.num_threads or max(1, usable_cores() // beside)
            number = generators.index(rank.rank) if rank.rank in generators else -1
            places.append(Place(rank.rank, teams, generators, threads, Home.of_driver(), number))
        self._workers: list[Any] = [self._start_worker(place) for place in places]
        self._learners = [rank for team in teams for rank in team]
        others = {rank: places[rank] for rank in generators if rank not in self._learners}
        leader = self._workers[self._learners[0]]
        self._others = Replacements(others, self._start_worker, self._coordinator, leader)
        self._pulse = Pulse({**dict(enumerate(self._workers)), **self._services})
        self.finished = False

    def build(self, say: Callable[[str], None]) -> list[str]:
        """Engines and services of all workers; what differs from the checkpoint without harm."""
        with _told_what_next(self._spec):
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
        options = self._spec.options
        with _told_what_next(self._spec):
            standing = self._standing()
        view = TerminalView(f"{options.project} / {options.experiment}", standing.total_steps)
        pulse = self._pulse
        told = _Told(view, Caller(callbacks, lambda message: view.note("warning", message)))

        def asked_to_stop(name: str) -> None:
            view.note("info", f"{name}: finishing this step, then leaving; a second time leaves at once")
            self._coordinator.stop.remote()

        with StopRequest(asked_to_stop, ends_process=ends_process) as stop, _told_what_next(self._spec):
            running = {self._run(rank, differences): rank for rank in range(len(self._workers))}
            learning = set(self._learners)
            steps = 0
            try:
                while learning:
                    told.show(self._coordinator)
                    self._look_after(pulse)
                    done, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
                    for ref in done:
                        rank = running.pop(ref)
                        try:
                            steps = max(steps, self._result(ref, rank))
                        except WorkerDied as died:
                            if rank not in self._others:
                                raise
                            pulse.forget(rank)
                            self._others.begin(rank, str(died))
                        except Exception as error:
                            late = isinstance(error, PeersLate)
                            if behind := self._hanging(running) if late else self._death_behind(running):
                                raise behind from error
                            raise
                        learning.discard(rank)
                    for rank, worker in self._others.come().items():
                        self._workers[rank] = worker
                        pulse.follow(rank, worker)
                        running[self._run(rank, differences)] = rank
                        self._others.welcome(rank, worker)
                self._end(running)
                told.show(self._coordinator, last=True)
            finally:
                view.close()
        return steps, stop

    def kill(self) -> None:
        """No process of the run is left."""
        self._others.kill()
        for actor in [*self._workers, *self._services.values()]:
            with suppress(Exception):  # it is gone already
                ray.kill(actor)
        self._meeting.unlink(missing_ok=True)

    @property
    def _services(self) -> dict[int, Any]:
        """Actors that are no workers."""
        return {COORDINATOR: self._coordinator, **({EXCHANGE: self._exchange} if self._exchange is not None else {})}

    def _standing(self) -> Standing:
        standing: Standing = answer_of(self._coordinator.standing.remote(), _name(COORDINATOR), ANSWERS_WITHIN_S)
        return standing

    def _in_step(self) -> str:
        try:
            standing: Standing = ray.get(self._coordinator.standing.remote(), timeout=_DEATHS_ARE_TOLD_WITHIN_S)
        except (RayActorError, GetTimeoutError):  # which is told by itself
            return ""
        return f", in step {min(standing.version.step + 1, standing.total_steps)}"

    def _start_worker(self, place: Place) -> Any:
        ranks = self._spec.plan.ranks
        rank, nodes = ranks[place.rank], sorted({each.node for each in ranks})
        where = PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=nodes.index(rank.node))
        return (
            ray.remote(WorkerActor)
            .options(
                num_cpus=1,
                num_gpus=int(rank.device.startswith("cuda")),
                scheduling_strategy=where,
                max_concurrency=_NUM_CALLS,
            )
            .remote(self._spec, place, self._coordinator, self._meeting, self._exchange)
        )

    def _run(self, rank: int, differences: list[str]) -> Any:
        leads = rank == self._learners[0]
        others = {each: self._workers[each] for each in self._others.ranks} if leads else {}
        return self._workers[rank].run.remote(self._start, differences, others)

    def _end(self, running: Mapping[Any, int]) -> None:
        """All has been learned: those that generate leave. One that has died, or just come, has nothing to end."""
        leader, serving = self._learners[0], list[int]()
        with suppress(WorkerDied):
            serving = answer_of(self._workers[leader].serving.remote(), _name(leader), ANSWERS_WITHIN_S)
        self._coordinator.end.remote()
        for ref, rank in running.items():
            if rank not in self._others:
                self._result(ref, rank, ENDS_WITHIN_S)
            elif rank in serving:
                with suppress(WorkerDied, GetTimeoutError):
                    self._result(ref, rank, ENDS_WITHIN_S)
        self.finished = self._standing().finished

    def _look_after(self, pulse: "Pulse") -> None:
        """Raises WorkerDied for a process that does not answer; one that can be replaced is killed: whatever it does
        when it wakes, nobody hears of it."""
        _check_ray()
        silent = pulse.silent()
        if silent is None:
            return
        message = self._silence(silent)
        if silent not in self._others:
            raise WorkerDied(message)
        self._workers[self._learners[0]].note.remote("warning", f"{message} It is killed")
        pulse.forget(silent)
        ray.kill(self._workers[silent])

    def _result(self, ref: Any, rank: int, timeout_s: float | None = None) -> int:
        try:
            return int(ray.get(ref, timeout=timeout_s))
        except RayTaskError as err:
            raise err.cause from err
        except RayActorError as err:
            raise self._died(rank, f"while the run was under way{self._in_step()}", err) from err

    def _death_behind(self, running: Mapping[Any, int]) -> WorkerDied | None:
        """A worker's error may come of the death of one that it needs, which is told a moment later."""
        for number, actor in self._services.items():
            try:
                ray.get(actor.alive.remote(), timeout=_DEATHS_ARE_TOLD_WITHIN_S)
            except RayActorError as err:
                return WorkerDied(f"{_name(number)} has died ({_process_of(err)}): {_CAUSES}")
            except GetTimeoutError:  # told by its pulse, if it is more than slow
                continue
        learning = {ref: rank for ref, rank in running.items() if rank in self._learners}
        until = time.monotonic() + _DEATHS_ARE_TOLD_WITHIN_S
        while learning and time.monotonic() < until:
            done, _ = ray.wait(list(learning), timeout=until - time.monotonic())
            for ref in done:
                try:
                    self._result(ref, learning.pop(ref))
                except WorkerDied as died:
                    return died
                except Exception:  # it came of the same
                    continue
        return None

    def _hanging(self, running: Mapping[Any, int]) -> WorkerHangs | None:
        """Those that did not come in time, told by one that waited for them; None where they have ended since."""
        learning = [ref for ref, rank in running.items() if rank in self._learners]
        if not learning:
            return None
        _, late = ray.wait(learning, num_returns=len(learning), timeout=_DEATHS_ARE_TOLD_WITHIN_S)
        if not late:
            return None
        stacks = self._spec.run_dir / STACKS
        asked = [self._workers[rank].write_stacks.remote(stacks) for rank in running.values()]
        asked += [self._workers[running[ref]].where.remote() for ref in late]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ENDS_WITHIN_S)
        places = [
            f"worker {running[ref]} is {ray.get(where) if where in answered else 'silent'}"
            for ref, where in zip(late, asked[-len(late) :], strict=True)
        ]
        return WorkerHangs(
            f"{' and '.join(places)}, and has not come to what all ranks do together within "
            f"{self._spec.options.peers_timeout_s:g} s (trainer.peers_timeout_s): a function or a lock that "
            f"does not end, or a rank with much more to do. What it is at stands in {stacks}."
        )

    def _died(self, rank: int, when: str, err: RayActorError) -> WorkerDied | WorkerFailed:
        if err.actor_init_failed:  # by an exception, which is all that Ray tells of it
            said = str(err).strip().splitlines()[-1]
            return WorkerFailed(f"{self._who(rank, err)} could not be started: {said}")
        plan = self._spec.plan.ranks[rank]
        does = " and ".join(
            name for name, nodes in (("generates", plan.experience), ("trains", plan.learning)) if nodes
        )
        return WorkerDied(
            f"worker {rank} of {len(self._workers)}, which {does}, has died {when} ({_process_of(err)}): {_CAUSES}"
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

    def _silence(self, silent: int) -> str:
        """Every process that still answers writes what its threads are at."""
        stacks = self._spec.run_dir / STACKS
        asked = [worker.write_stacks.remote(stacks) for rank, worker in enumerate(self._workers) if rank != silent]
        ray.wait(asked, num_returns=len(asked), timeout=ENDS_WITHIN_S)
        return (
            f"{_name(silent)} has not answered for {self._pulse.limit_s(silent):g} s: its process is stopped, hangs in "
            f"native code, or its machine is gone. What the others were at stands in {stacks}."
        )

    def _all(self, refs: Sequence[Any]) -> list[Any]:
        """In order; what fails first is raised at once."""
        waiting, ranks = list(refs), {ref: rank for rank, ref in enumerate(refs)}
        while waiting:
            _check_ray()
            if (silent := self._pulse.silent()) is not None:
                raise WorkerDied(self._silence(silent))
            done, waiting = ray.wait(waiting, timeout=_LOOKS_EVERY_S)
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


def _name(number: int) -> str:
    return {COORDINATOR: "the coordinator", EXCHANGE: "the exchange"}.get(number, f"worker {number}")


def _check_ray() -> None:
    """Raises WorkerDied: without all of its Ray a run comes to no end."""
    if what := gone():
        raise WorkerDied(what)


def _process_of(err: RayActorError) -> str:
    """As Ray's own text has it."""
    return next((line.strip() for line in str(err).splitlines() if line.strip().startswith("pid:")), "pid: unknown")


@contextmanager
def _told_what_next(spec: Spec) -> Iterator[None]:
    """A death that ends the run says where the next start begins. Where a process of Ray itself is gone or stopped, the
    others died of that."""
    try:
        yield
    except WorkerDied as died:
        told = f"{what}, and the workers with it: {_CAUSES}" if (what := ailing()) else str(died)
        store = open_store(spec)
        where = store.load().path.name if store.exists() else "the start: nothing was saved yet (trainer.save_freq)"
        raise type(died)(f"{told} The same command goes on from {where}") from died


class Pulse:
    """Whether processes answer, asked one question after another on a thread that does nothing else."""

    def __init__(self, actors: Mapping[int, Any]) -> None:
        """actors: by rank."""
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, tuple[Any, float]] = {}
        self._heard = set[int]()
        self._looked = time.monotonic()
        for rank, actor in actors.items():
            self.follow(rank, actor)

    def follow(self, rank: int, actor: Any) -> None:
        """It is asked from now on."""
        self._actors[rank] = actor
        self._asked[rank] = (actor.alive.remote(), time.monotonic())

    def forget(self, rank: int) -> None:
        """It is asked no more."""
        self._actors.pop(rank, None)
        self._asked.pop(rank, None)

    def silent(self) -> int | None:
        """The rank of one that has not answered for `limit_s`, if there is one."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > _AWAY_S:  # this process itself was stopped: answers are on their way
            self._asked = {rank: (ref, since + now - before) for rank, (ref, since) in self._asked.items()}
        for rank, (ref, since) in list(self._asked.items()):
            if ray.wait([ref], timeout=0)[0]:
                self._heard.add(rank)
                self.follow(rank, self._actors[rank])
            elif now - since > self.limit_s(rank):
                return rank
        return None

    def limit_s(self, rank: int) -> float:
        """How long it may take to answer. The first time it is on its way: it starts, and imports."""
        return ANSWERS_WITHIN_S if rank in self._heard else STARTS_WITHIN_S


class _Told:
    """What workers tell, on the driver's screen and to the user's functions."""

    def __init__(self, view: TerminalView, caller: Caller) -> None:
        self._view = view
        self._callers: dict[str, Callable[..., None]] = {
            "on_step": caller.step,
            "on_validation": caller.validation,
            "on_save": caller.save,
        }
        self._asked: Any = None

    def show(self, coordinator: Any, last: bool = False) -> None:
        """What was told since, or is within a moment. Raises WorkerDied where the coordinator's process is gone."""
        for method, arguments in self._news(coordinator, last):
            tell: Callable[..., None] = self._callers.get(method) or getattr(self._view, method)
            tell(*arguments)

    def _news(self, coordinator: Any, last: bool) -> list[News]:
        self._asked = self._asked or coordinator.news.remote(0.0 if last else _LOOKS_EVERY_S)
        if not last and not ray.wait([self._asked], timeout=2 * _LOOKS_EVERY_S)[0]:
            return []  # whether it answers at all is told by its pulse
        asked, self._asked = self._asked, None
        found: list[News] = answer_of(asked, _name(COORDINATOR), ANSWERS_WITHIN_S)
        return found
