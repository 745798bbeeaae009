"""The supervisor of a Ray run: starts its actors, one worker per device, watches, kills and
restarts them."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from distflow import __version__
from distflow.cluster import remote_calls
from distflow.cluster.coordinator_actor import CoordinatorActor, Progress
from distflow.cluster.failure_causes import Blame, with_resume_hint
from distflow.cluster.heartbeat import Heartbeat
from distflow.cluster.process_groups import new_meeting, remove_meetings
from distflow.cluster.ray_cluster import (
    PLACED_WITHIN_S,
    Bundle,
    bound_of,
    failed_process,
    wait_for_room,
)
from distflow.cluster.remote_calls import WorkerDied
from distflow.cluster.reports_to_driver import DriverOutput, shown
from distflow.cluster.worker_actor import BuildReport, WorkerActor, check_reports
from distflow.cluster.worker_replacements import Replacements
from distflow.errors import UserError, count_of
from distflow.launch.run_end import DRIVER, done_before, note_failure, outcome_of
from distflow.launch.run_start import Start, find_start
from distflow.launch.threads import places_of
from distflow.observe.run_reader import read_events
from distflow.observe.writing.run_folder import (
    RunFolder,
    RunFolderError,
    claim_again,
    wait_for_joined,
)
from distflow.observe.writing.timing import lasting
from distflow.runtime.callbacks import Callbacks
from distflow.runtime.rollout_loop.engine_watch import STACKS
from distflow.runtime.spec import LaunchOptions, Outcome, Spec
from distflow.runtime.stop_signals import StopRequest
from distflow.runtime.weight_sync.bucket_files import remove_weights
from distflow.runtime.worker_place import Place

_LOOKS_EVERY_S = 0.5
Say = Callable[[str], None]
# calls of a worker that may wait at once: groups, a step, its end, messages, the heartbeat
_NUM_CALLS = 6
# of a user's own loop to one worker at once, in separate threads
_GENERATE = "generate"
_NUM_REQUESTS = 64


class RayRun(AbstractContextManager["RayRun"]):
    """A context manager that starts the actors of a run in the bundles of their nodes, and kills
    them on exit."""

    def __init__(
        self, spec: Spec, start: Start, bundles: Mapping[int, Bundle], own_loop: bool = False
    ) -> None:
        """own_loop: see `driven`."""
        self._spec = spec
        self._start = start
        self._bundles = bundles
        self._own_loop = own_loop
        places = places_of(spec)
        spec = replace(spec, data=replace(spec.data, max_held_bytes=bound_of(spec)))
        self._meeting = new_meeting(spec.run_dir)
        coordinator: Any = ray.remote(CoordinatorActor)  # Ray's handles have no types
        calls = _NUM_CALLS * len(places) + _NUM_CALLS
        self.coordinator = coordinator.options(num_cpus=0, max_concurrency=calls).remote(
            spec, start, own_loop
        )
        self._workers: list[Any] = [self._start_worker(place) for place in places]
        self.training_ranks = places[0].trainers
        self._leader = self.training_ranks[0]
        self._blame = Blame(self._spec, self._workers, self.training_ranks, self.coordinator)
        others = {
            rank: places[rank] for rank in places[0].generators if rank not in self.training_ranks
        }
        self._others = Replacements(
            others, self._start_worker, self.coordinator, self._workers[self._leader]
        )
        workers = dict(enumerate(self._workers))
        self._heartbeat = Heartbeat({**workers, remote_calls.COORDINATOR: self.coordinator})
        self.finished = False
        self._steps = 0
        self.stop = StopRequest(lambda name: None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End all processes of the run, and wait until none writes to its folder."""
        starting = [starting.worker for starting in self._others.starting.values()]
        for actor in [*starting, *self._workers, self.coordinator]:
            remote_calls.kill(actor)

        with suppress(OSError, RunFolderError):  # the next start tries again
            wait_for_joined(self._spec.run_dir)
            remove_meetings(self._spec.run_dir)
            remove_weights(self._spec.run_dir)

        if error is not None:
            note_failure(self._spec.run_dir, error)

    def build(self, say: Callable[[str], None]) -> list[str]:
        """Build engines and services of all workers; returns the harmless differences from the
        checkpoint."""
        workers = count_of(len(self._workers), "worker")
        with (
            with_resume_hint(self._spec),
            lasting(say, f"starting {workers} and loading their models"),
        ):
            reports: list[BuildReport] = self._all(
                [worker.build.remote() for worker in self._workers]
            )

        for rank, report in enumerate(reports):
            if report.version != __version__:
                raise UserError(
                    f"worker {rank} has distflow {report.version}, and this process {__version__}: "
                    "install the same version on every machine"
                )

        return check_reports(reports, self._leader, self._spec, self._start, say)

    def watch(self, differences: list[str], options: LaunchOptions) -> int:
        """Supervise until the run has ended; returns the steps consumed in total. Raises what a
        worker raised first."""
        with (
            with_resume_hint(self._spec),
            shown(self._spec, self._progress().total_steps, options.callbacks) as output,
        ):

            def asked_to_stop(name: str) -> None:
                output.note_stop(name)
                self.coordinator.stop.remote()

            self.stop = StopRequest(asked_to_stop, ends_process=not options.embedded)
            with self.stop:
                for _ in self._rounds(differences, output):
                    pass

        return self._steps

    @contextmanager
    def driven(self, differences: list[str]) -> Iterator[Progress]:
        """Inside, a user's own loop drives the training ranks by `call`, and supervises while it
        waits. An error there waits only for a checkpoint that is being written."""
        everyone: dict[int, Sequence[Any]] = dict.fromkeys(self.training_ranks, ())
        progress = self._progress()

        has_ended = False
        with shown(self._spec, progress.total_steps, Callbacks(), waits_s=0.0) as output:
            self._supervision = self._rounds(differences, output)
            try:
                next(self._supervision)
                self.call("finish_saving", everyone)  # replies once all have started
                yield progress
                self.call("leave", everyone)
                for _ in self._supervision:
                    time.sleep(_LOOKS_EVERY_S)
                has_ended = True
            except WorkerDied:
                has_ended = True
                raise
            finally:
                if not has_ended:  # by a user's error, or Ctrl-C
                    saving = [self._workers[rank].call.remote("finish_saving") for rank in everyone]
                    ray.wait(saving, num_returns=len(saving), timeout=remote_calls.ENDS_WITHIN_S)

    def call(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """The replies of training ranks to a call of `RankCalls`, by rank. Raises the first
        error."""
        refs = {
            self._workers[rank].call.remote(name, *own): rank for rank, own in arguments.items()
        }
        return dict(zip(refs.values(), self.replies(refs), strict=True))

    def replies(self, refs: Mapping[Any, int]) -> list[Any]:
        """The replies of actors, while supervising the run. refs: with the number of each. Raises
        WorkerDied, and what an actor raised."""
        waiting = list(refs)
        with with_resume_hint(self._spec):
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOKS_EVERY_S)
                for ref in done:
                    try:
                        remote_calls.reply(ref)
                    except RayActorError as err:
                        raise self._blame.died(
                            refs[ref], "while the loop waited for it", err
                        ) from err

                next(self._supervision, None)

        return ray.get(list(refs))

    def with_newest_weights(self) -> list[int]:
        """Ranks of the workers that only generate and have the newest weights."""
        newest: list[int] = remote_calls.reply_of(
            self._workers[self._leader].with_newest_weights.remote(), self._leader
        )
        return newest

    def generate(self, rank: int, request: Any) -> Any:
        """A reference to the result of a worker's engine: see `Worker.generate`."""
        return self._workers[rank].generate.options(concurrency_group=_GENERATE).remote(request)

    async def done(self, ref: Any) -> None:
        """Wait for an actor in the caller's event loop, while supervising the run."""
        waiting = asyncio.wrap_future(remote_calls.future_of(ref))
        while not waiting.done():
            await asyncio.wait([waiting], timeout=_LOOKS_EVERY_S)
            next(self._supervision, None)
        waiting.exception()  # read here, since the caller asks for the reply itself

    def _rounds(self, differences: list[str], output: DriverOutput) -> Iterator[None]:
        """Start the loops of all workers, and supervise them until those that train have ended. A
        round waits for nothing: its caller does so before the next. Raises what ends the run."""
        running = {self._run(rank, differences): rank for rank in range(len(self._workers))}
        still_training = set(self.training_ranks)
        while still_training:
            output.show(self.coordinator)
            self._kill_silent()
            still_training -= self._take_ended(running)
            self._run_replacements(differences, running)
            yield

        self._end(running)
        output.show(self.coordinator, last=True)

    def _take_ended(self, running: dict[Any, int]) -> set[int]:
        """Remove the loops that have ended from those that run; returns their ranks."""
        ended = set[int]()
        done, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
        for ref in done:
            rank = running.pop(ref)
            ended.add(rank)
            self._take(rank, self._blame.outcome(ref, rank), running)

        return ended

    def _run_replacements(self, differences: list[str], running: dict[Any, int]) -> None:
        """Start the loops of replacements whose engines are built."""
        for rank, worker in self._others.ready().items():
            self._workers[rank] = worker
            self._heartbeat.follow(rank, worker)
            running[self._run(rank, differences)] = rank
            self._others.connect(rank, worker)

    def _take(self, rank: int, outcome: int | BaseException, running: Mapping[Any, int]) -> None:
        """Take the end of a worker: replace it if it died and can be replaced. Raises what ends the
        run."""
        if isinstance(outcome, int):
            self._steps = max(self._steps, outcome)
            return

        if not isinstance(outcome, WorkerDied):
            cause = self._blame.cause_of(outcome, running)
            if cause is not None:
                raise cause from outcome
            raise outcome

        if rank not in self._others.places:
            raise outcome
        self._heartbeat.forget(rank)
        self._others.begin(rank, str(outcome))

    def _progress(self) -> Progress:
        progress: Progress = remote_calls.reply_of(
            self.coordinator.progress.remote(), remote_calls.COORDINATOR
        )
        return progress

    def _start_worker(self, place: Place) -> Any:
        rank = self._spec.plan.ranks[place.rank]
        needs = self._spec.needs.of(rank)
        remote: Any = ray.remote  # Ray's handles have no types
        num_requests = _NUM_REQUESTS if self._own_loop else 1
        actor = remote(concurrency_groups={_GENERATE: num_requests})(WorkerActor).options(
            num_cpus=needs.cpus,
            num_gpus=int(rank.device.startswith("cuda")),
            scheduling_strategy=self._bundles[rank.node],
            max_concurrency=_NUM_CALLS,
            runtime_env={"env_vars": dict(needs.env)} if needs.env else None,
        )

        return actor.remote(self._spec, self._start, place, self.coordinator, self._meeting)

    def _run(self, rank: int, differences: list[str]) -> Any:
        others = {}
        if rank == self._leader:
            others = {each: self._workers[each] for each in self._others.places}
        return self._workers[rank].run.remote(differences, others, self._own_loop)

    def _end(self, running: Mapping[Any, int]) -> None:
        """End the rollout workers after training. One that has died, or has just started, has
        nothing to end."""
        generating = list[int]()
        with suppress(WorkerDied):
            generating = self.with_newest_weights()
        self.coordinator.close.remote()

        for ref, rank in running.items():
            can_be_replaced = rank in self._others.places
            if can_be_replaced and rank not in generating:
                continue

            outcome = self._blame.outcome(ref, rank, remote_calls.ENDS_WITHIN_S)
            may_be_gone = isinstance(outcome, WorkerDied | GetTimeoutError) and can_be_replaced
            if isinstance(outcome, BaseException) and not may_be_gone:
                raise outcome

        self.finished = self._progress().finished

    def _kill_silent(self) -> None:
        """Raises WorkerDied for a process that does not respond; a replaceable one is killed, so
        that it does nothing if it wakes."""
        _check_ray()
        silent = self._heartbeat.silent()
        if silent is None:
            return

        message = self._heartbeat.describe_silence(silent, self._spec.run_dir / STACKS)
        if silent not in self._others.places:
            raise WorkerDied(message)

        self._workers[self._leader].note.remote("warning", f"{message} It is killed")
        self._heartbeat.forget(silent)
        ray.kill(self._workers[silent])

    def _all(self, refs: Sequence[Any]) -> list[Any]:
        """The results in order; the first failure is raised at once."""
        waiting = list(refs)
        ranks = {ref: rank for rank, ref in enumerate(refs)}

        while waiting:
            _check_ray()
            if (silent := self._heartbeat.silent()) is not None:
                raise WorkerDied(
                    self._heartbeat.describe_silence(silent, self._spec.run_dir / STACKS)
                )

            done, waiting = ray.wait(waiting, timeout=_LOOKS_EVERY_S)
            for ref in done:
                try:
                    ray.get(ref)
                except RayTaskError as err:
                    raise self._blame.build_failed(ranks[ref], err) from err
                except RayActorError as err:
                    raise self._blame.died(ranks[ref], "while its engines were built", err) from err

        return ray.get(list(refs))


def start_again(
    spec: Spec,
    start: Start,
    bundles: Collection[Bundle],
    number: int,
    died: WorkerDied,
    say: Callable[[str], None],
) -> Start:
    """Where the run restarts after a loss, once its actors have ended and its bundles are in place.
    number: of the restart, from 1. Raises WorkerDied if there is no room any more."""
    message = (
        f"{died.__cause__ or died} Restart {number} of {spec.config.trainer.max_restarts} "
        "(trainer.max_restarts)"
    )
    say(message)
    events = read_events(spec.run_dir)
    with RunFolder(spec.run_dir, events[-1].restart if events else 0, part=DRIVER) as folder:
        folder.event("warning", message)

    try:
        wait_for_room(bundles, PLACED_WITHIN_S, say)
    except UserError as err:
        raise type(died)(f"{died}. It cannot restart in place: {err}") from died

    return find_start(spec, "auto", start.allowed, claim_again(spec.run_dir, number))


def supervise(
    spec: Spec, start: Start, bundles: Mapping[int, Bundle], options: LaunchOptions
) -> Outcome:
    """Run to the end. If a process is lost, the run restarts from its last checkpoint in the same
    bundles, at most `trainer.max_restarts` times, unless a signal has asked it to end, or Ray
    itself has failed."""
    for number in range(1, spec.config.trainer.max_restarts + 2):
        run = RayRun(spec, start, bundles)
        try:
            with run:
                steps = run.watch(run.build(options.say), options)
            break
        except WorkerDied as died:
            if number > spec.config.trainer.max_restarts or run.stop.wanted or failed_process():
                raise
            start = start_again(spec, start, bundles.values(), number, died, options.say)
            if done := done_before(spec, start, options.say):
                return done

    return outcome_of(spec, steps, run.stop.signal, stopped=run.stop.wanted and not run.finished)


def _check_ray() -> None:
    """Raises WorkerDied if a process of Ray itself is gone, since the run would not end."""
    if process := failed_process():
        raise WorkerDied(process)
