"""The Ray launcher: starts the actors of a run, one worker a device, and supervises them to the end."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distflow import __version__
from distflow.cluster.coordinator_actor import CoordinatorActor, Progress
from distflow.cluster.failures import Blame, WorkerDied, reply_of, with_resume_hint
from distflow.cluster.heartbeat import COORDINATOR, ENDS_WITHIN_S, EXCHANGE, FIRST_REWARD_ACTOR, Heartbeat
from distflow.cluster.local_ray import gone
from distflow.cluster.log_forwarding import DriverOutput
from distflow.cluster.placement import bound_of, bundles_of, connected
from distflow.cluster.reshard_columns import ReshardActor
from distflow.cluster.restarts import Replacements
from distflow.cluster.reward_actors import Deaths, start_reward_actors
from distflow.cluster.worker_actor import Built, WorkerActor
from distflow.errors import UserError
from distflow.launch.run_setup import Start, done_before, find_accuracies, model_line, starting
from distflow.observe.reading.run_reader import read_events
from distflow.observe.report.build import write_report
from distflow.observe.writing.folder_lock import writer_of
from distflow.observe.writing.run_folder import RunFolder
from distflow.observe.writing.terminal import TerminalView
from distflow.planning.plan import RankPlan, dp_groups_of
from distflow.planning.threads import share_threads, usable_cores
from distflow.runtime.checkpoint.state import check_same_facts
from distflow.runtime.engine_watch import STACKS
from distflow.runtime.rank_info import Home, Place, queue_dp_group
from distflow.runtime.recorder import reported
from distflow.runtime.spec import Outcome, Spec
from distflow.runtime.stop import StopRequest
from distflow.runtime.user_calls.sync_calls import Callbacks, Caller
from distflow.runtime.weight_sync.buckets import remove_weights

_LOOKS_EVERY_S = 0.5
_NUM_CALLS = 6  # of a worker that may wait at once: groups, a step, its end, news, the heartbeat


def _threads(spec: Spec, rank: RankPlan, cores: int) -> int:
    """Threads of torch for a worker, or for its training loop where its engine computes at the same time."""
    trainer, rollout = spec.config.trainer.num_threads, spec.config.actor_rollout_ref.rollout.num_threads
    if spec.data.max_staleness and rank.training_nodes and "rollout" in rank.engines:
        return share_threads(cores, trainer, rollout)[0]
    return trainer or cores


class RayRun:
    """Starts the actors of a run, supervises them to the end, and kills them."""

    def __init__(self, spec: Spec, start: Start, allowed: tuple[str, ...], bundles: PlacementGroup) -> None:
        self._spec, self._start = spec, start
        ranks, max_held_bytes = spec.plan.ranks, bound_of(spec)
        spec = replace(spec, data=replace(spec.data, max_held_bytes=max_held_bytes))
        self._reward_actors = start_reward_actors(spec)  # first: there may be no room for them
        dp_groups = dp_groups_of(spec.plan)
        generators = tuple(rank.rank for rank in ranks if rank.rollout_nodes)
        for left in spec.run_dir.glob(".meeting-*"):  # by a driver that was killed: the folder is this one's now
            left.unlink(missing_ok=True)
        meeting = spec.run_dir / f".meeting-{secrets.token_hex(4)}"
        self._meeting = meeting
        calls = _NUM_CALLS * len(ranks) + _NUM_CALLS
        self._coordinator: Any = (  # Ray's handles have no types
            ray.remote(CoordinatorActor)
            .options(num_cpus=0, max_concurrency=calls)
            .remote(
                spec,
                start,
                allowed,
                [queue_dp_group(spec, dp_group) for dp_group in dp_groups],
                [str(rank) for rank in generators],
            )
        )
        exchanges = any(channel.kind == "exchange" for channel in spec.plan.channels)
        self._exchange = cast(Any, ReshardActor).remote(max_held_bytes) if exchanges else None
        self._bundles = bundles
        places = []
        for rank in ranks:
            beside = sum(other.node == rank.node for other in ranks)
            threads = _threads(spec, rank, max(1, usable_cores() // beside))
            number = generators.index(rank.rank) if rank.rank in generators else -1
            places.append(Place(rank.rank, dp_groups, generators, threads, Home.of_driver(), number))
        self._workers: list[Any] = [self._start_worker(place) for place in places]
        self._training_ranks = [rank for dp_group in dp_groups for rank in dp_group]
        self._services = {COORDINATOR: self._coordinator}
        if self._exchange is not None:
            self._services[EXCHANGE] = self._exchange
        self._blame = Blame(self._spec, self._workers, self._training_ranks, self._services)
        others = {rank: places[rank] for rank in generators if rank not in self._training_ranks}
        leader = self._workers[self._training_ranks[0]]
        self._others = Replacements(others, self._start_worker, self._coordinator, leader)
        reward_actors = {
            FIRST_REWARD_ACTOR - number: reward_actor for number, reward_actor in enumerate(self._reward_actors)
        }
        self._deaths = Deaths(self._reward_actors)
        self._heartbeat = Heartbeat({**dict(enumerate(self._workers)), **self._services, **reward_actors})
        self.finished = False

    def build(self, say: Callable[[str], None]) -> list[str]:
        """Build engines and services of all workers; returns the harmless differences from the checkpoint."""
        with with_resume_hint(self._spec):
            built: list[Built] = self._all([worker.build.remote() for worker in self._workers])
        for rank, each in enumerate(built):
            if each.version != __version__:
                raise UserError(
                    f"worker {rank} has distflow {each.version}, and this process {__version__}: install the same on "
                    "every machine"
                )
        leader = built[self._training_ranks[0]]
        say(model_line(self._spec, leader.num_parameters))
        facts = {**self._spec.facts, **leader.facts}
        return check_same_facts(self._start.checkpoint, self._spec, facts) if self._start.checkpoint else []

    def watch(self, differences: list[str], callbacks: Callbacks, ends_process: bool) -> tuple[int, StopRequest]:
        """Supervise until the run has ended; returns the steps consumed in all. Raises what a worker raised first."""
        options = self._spec.options
        with with_resume_hint(self._spec):
            progress = self._progress()
        view = TerminalView(f"{options.project} / {options.experiment}", progress.total_steps)
        output = DriverOutput(view, Caller(callbacks, lambda message: view.note("warning", message)))

        def asked_to_stop(name: str) -> None:
            view.note("info", f"{name}: finishing this step, then leaving; a second time leaves at once")
            self._coordinator.stop.remote()

        with StopRequest(asked_to_stop, ends_process=ends_process) as stop, with_resume_hint(self._spec):
            running = {self._run(rank, differences): rank for rank in range(len(self._workers))}
            still_training = set(self._training_ranks)
            steps = 0
            try:
                while still_training:
                    output.show(self._coordinator)
                    self._look_after()
                    done, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
                    for ref in done:
                        rank = running.pop(ref)
                        try:
                            steps = max(steps, self._blame.result(ref, rank))
                        except WorkerDied as died:
                            if rank not in self._others:
                                raise
                            self._heartbeat.forget(rank)
                            self._others.begin(rank, str(died))
                        except Exception as error:
                            if cause := self._blame.cause_of(error, running):
                                raise cause from error
                            raise
                        still_training.discard(rank)
                    for rank, worker in self._others.come().items():
                        self._workers[rank] = worker
                        self._heartbeat.follow(rank, worker)
                        running[self._run(rank, differences)] = rank
                        self._others.welcome(rank, worker)
                self._end(running)
                output.show(self._coordinator, last=True)
            finally:
                view.close()
        return steps, stop

    def kill(self) -> None:
        """End all processes of the run, and wait until none locks its folder: the same command may follow at once."""
        self._others.kill()
        for actor in [*self._workers, *self._services.values(), *self._reward_actors]:
            with suppress(Exception):  # it is gone already
                ray.kill(actor)
        self._meeting.unlink(missing_ok=True)
        until = time.monotonic() + ENDS_WITHIN_S
        while writer_of(self._spec.run_dir) is not None and time.monotonic() < until:
            time.sleep(0.05)
        with suppress(OSError):  # the next start tries again
            remove_weights(self._spec.run_dir)

    def _progress(self) -> Progress:
        progress: Progress = reply_of(self._coordinator.progress.remote(), COORDINATOR)
        return progress

    def _start_worker(self, place: Place) -> Any:
        ranks, needs = self._spec.plan.ranks, self._spec.options.worker
        rank, nodes = ranks[place.rank], sorted({each.node for each in ranks})
        where = PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=nodes.index(rank.node))
        return (
            ray.remote(WorkerActor)
            .options(
                num_cpus=needs.cpus,
                num_gpus=int(rank.device.startswith("cuda")),
                scheduling_strategy=where,
                max_concurrency=_NUM_CALLS,
                runtime_env={"env_vars": dict(needs.env)} if needs.env else None,
            )
            .remote(self._spec, place, self._coordinator, self._meeting, self._exchange, self._reward_actors)
        )

    def _run(self, rank: int, differences: list[str]) -> Any:
        leads = rank == self._training_ranks[0]
        others = {each: self._workers[each] for each in self._others.ranks} if leads else {}
        return self._workers[rank].run.remote(self._start, differences, others)

    def _end(self, running: Mapping[Any, int]) -> None:
        """Training has ended: the rollout workers leave. One that has died, or has just started, has nothing to end."""
        leader, serving = self._training_ranks[0], list[int]()
        with suppress(WorkerDied):
            serving = reply_of(self._workers[leader].serving.remote(), leader)
        self._coordinator.close.remote()
        for ref, rank in running.items():
            if rank not in self._others:
                self._blame.result(ref, rank, ENDS_WITHIN_S)
            elif rank in serving:
                with suppress(WorkerDied, GetTimeoutError):
                    self._blame.result(ref, rank, ENDS_WITHIN_S)
        self.finished = self._progress().finished

    def _look_after(self) -> None:
        """Raises WorkerDied for a process that does not respond; one that can be replaced is killed, so that it does
        nothing if it wakes."""
        _check_ray()
        for death in self._deaths.found():
            self._workers[self._training_ranks[0]].note.remote("warning", death)
        silent = self._heartbeat.silent()
        if silent is None:
            return
        message = self._heartbeat.describe_silence(silent, self._spec.run_dir / STACKS)
        if silent <= FIRST_REWARD_ACTOR:
            reward_actor = self._reward_actors[FIRST_REWARD_ACTOR - silent]
            self._workers[self._training_ranks[0]].note.remote("warning", f"{message} It is killed, and started again")
            self._deaths.forgive(FIRST_REWARD_ACTOR - silent)
            ray.kill(reward_actor, no_restart=False)
            self._heartbeat.follow(silent, reward_actor)
            return
        if silent not in self._others:
            raise WorkerDied(message)
        self._workers[self._training_ranks[0]].note.remote("warning", f"{message} It is killed")
        self._heartbeat.forget(silent)
        ray.kill(self._workers[silent])

    def _all(self, refs: Sequence[Any]) -> list[Any]:
        """The results in order; the first failure is raised at once."""
        waiting, ranks = list(refs), {ref: rank for rank, ref in enumerate(refs)}
        while waiting:
            _check_ray()
            if (silent := self._heartbeat.silent()) is not None:
                raise WorkerDied(self._heartbeat.describe_silence(silent, self._spec.run_dir / STACKS))
            done, waiting = ray.wait(waiting, timeout=_LOOKS_EVERY_S)
            for ref in done:
                try:
                    ray.get(ref)
                except RayTaskError as err:
                    raise self._blame.unbuilt(ranks[ref], err) from err
                except RayActorError as err:
                    raise self._blame.died(ranks[ref], "while its engines were built", err) from err
        return ray.get(list(refs))


def _check_ray() -> None:
    """Raises WorkerDied where a process of Ray itself is gone: the run would not end."""
    if what := gone():
        raise WorkerDied(what)


_DRIVER = -1  # among the parts of a run's folder


def launch(
    spec: Spec, allow_change: tuple[str, ...], say: Callable[[str], None], callbacks: Callbacks, embedded: bool
) -> Outcome:
    """See `Launch`."""
    spec = replace(spec, options=replace(spec.options, run_dir=spec.run_dir.absolute()))  # actors start elsewhere
    with starting(spec, allow_change) as start:
        if start.checkpoint:
            check_same_facts(start.checkpoint, spec, spec.facts)
        if done := done_before(spec, start, say):
            return done
        start.set_aside(spec, say)
    needs = spec.options.worker
    with (
        connected(spec.plan, say, needs.num_reward_actors * needs.reward_cpus) as ends,
        bundles_of(spec.plan, needs, say, ends) as bundles,
        reported(spec.run_dir, say),
    ):
        run = RayRun(spec, start, allow_change, bundles)
        try:
            differences = run.build(say)
            steps, stop = run.watch(differences, callbacks, ends_process=not embedded)
        except BaseException as err:
            run.kill()
            _note_end(spec.run_dir, err)
            raise
        run.kill()
    stopped = stop.wanted and not run.finished
    return Outcome(steps, stop.signal, stopped, write_report(spec.run_dir), *find_accuracies(spec.run_dir))


def _note_end(run_dir: Path, error: BaseException) -> None:
    """A worker that was killed had no time to record how the run ended."""
    events = read_events(run_dir)
    if events and events[-1].kind != "end":
        with RunFolder(run_dir, events[-1].restart, part=_DRIVER) as folder:
            folder.event("error", f"{type(error).__name__}: {error}", raised=type(error).__name__)
            folder.event("end", "the run failed", status="failed")
