"""Several processes on one machine without Ray (`trainer.launcher=local`), one per device, each of
which generates and trains. The process that starts them has the sample queue, which they call over
sockets. Losing one ends the run."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distflow.cluster.coordinator_actor import CoordinatorActor
from distflow.cluster.heartbeat import Heartbeat, hanging
from distflow.cluster.peer import Peer
from distflow.cluster.process_groups import new_meeting, remove_meetings
from distflow.cluster.remote_calls import STARVED_S, PeersLate, WorkerDied
from distflow.cluster.reports_to_driver import shown
from distflow.cluster.worker_actor import BuildReport, WorkerActor, check_reports
from distflow.errors import TrustError, UserError, count_of
from distflow.launch.run_end import done_before, note_failure, outcome_of, resume_hint
from distflow.launch.run_start import Start, starting
from distflow.launch.threads import places_of
from distflow.observe.writing.run_folder import RunFolderError, wait_for_joined
from distflow.processes.child import Child, how_it_ended
from distflow.processes.interpreters import environment, python_command
from distflow.runtime.rollout_loop.engine_watch import STACKS
from distflow.runtime.run_recorder import reported
from distflow.runtime.spec import LAUNCH_DEFAULTS, LaunchOptions, Outcome, Spec
from distflow.runtime.stop_signals import StopRequest, leave_at_once
from distflow.runtime.worker_place import Place

_NUM_CALLS = 16
"""Maximum number of calls from one process that are served at the same time."""
_LOOKS_EVERY_S = 0.5
_CLEANS_UP_WITHIN_S = 2.0


class LocalWorker(WorkerActor):
    """The worker of this process, created by its first call."""

    def __init__(self, coordinator: Any) -> None:
        self._to_parent = coordinator

    def begin(self, spec: Spec, start: Start, place: Place, meeting: Path) -> BuildReport:
        """See `WorkerActor`, and its `build`."""
        super().__init__(spec, start, place, self._to_parent, meeting)
        return self.build()


class WorkerProcess:
    """One process of the run, and calls to its worker. It dies with this one, even if that is
    killed."""

    def __init__(self, place: Place, device: str, coordinator: object) -> None:
        ours, theirs = Pipe()
        variables = environment()
        if device.startswith("cuda"):
            seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
                map(str, range(place.rank + 1))
            )
            variables["CUDA_VISIBLE_DEVICES"] = seen.split(",")[place.rank]

        with theirs:
            self._child = Child(
                python_command(__name__, theirs.fileno()),
                variables,
                pass_fds=(theirs.fileno(),),
                stdout=None,
                stderr=None,
                leaves_s=_CLEANS_UP_WITHIN_S,
            )

        self.place = place
        self.calls = Peer(ours, _NUM_CALLS)
        threading.Thread(target=self.calls.serve, args=(coordinator,), daemon=True).start()

    def how_it_died(self) -> str | None:
        """How it ended, in words; None while it runs."""
        status = self._child.status()
        return None if status is None else how_it_ended(status)

    def kill(self) -> None:
        """Have it killed, and what it started, such as the user's code; what ends by itself has a
        moment to clean up."""
        self._child.kill()

    def wait(self) -> None:
        """Wait until nothing of it is left."""
        self._child.end()


class LocalRun(AbstractContextManager["LocalRun"]):
    """A context manager that starts the processes of a run, and kills them on exit."""

    def __init__(self, spec: Spec, start: Start) -> None:
        self._spec = spec
        self._start = start
        self._meeting = new_meeting(spec.run_dir)
        self.coordinator = CoordinatorActor(spec, start)
        ranks = spec.plan.ranks
        self._workers = [
            WorkerProcess(place, ranks[place.rank].device, self.coordinator)
            for place in places_of(spec)
        ]
        self._calls = {worker.place.rank: worker.calls for worker in self._workers}
        self._heartbeat = Heartbeat(self._calls)
        self.stop = StopRequest(lambda name: None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()
        self.coordinator.close()
        remove_meetings(self._spec.run_dir)
        with suppress(OSError, RunFolderError):  # the next start tries again
            wait_for_joined(self._spec.run_dir)
        if error is not None:
            note_failure(self._spec.run_dir, error)

    def build(self, say: Callable[[str], None]) -> list[str]:
        """Build engines and services of all workers; returns the harmless differences from the
        checkpoint."""
        spec = self._spec
        start = self._start

        begun = [
            worker.calls.begin.remote(spec, start, worker.place, self._meeting)
            for worker in self._workers
        ]
        while not all(call.done() for call in begun):
            wait(begun, _LOOKS_EVERY_S)
            self._check(begun, "while its engines were built")

        self._check(begun, "while its engines were built")
        return check_reports([call.result() for call in begun], 0, spec, start, say)

    def watch(self, differences: list[str], options: LaunchOptions) -> int:
        """Supervise until the run has ended; returns the steps consumed in total."""
        with shown(
            self._spec, self.coordinator.progress().total_steps, options.callbacks
        ) as output:

            def asked_to_stop(name: str) -> None:
                output.note_stop(name)
                self.coordinator.stop()

            self.stop = StopRequest(asked_to_stop, ends_process=not options.embedded)
            with self.stop:
                running = [
                    worker.calls.run.remote(differences, {}, False) for worker in self._workers
                ]
                try:
                    while not all(call.done() for call in running):
                        output.pass_on(self.coordinator.messages(_LOOKS_EVERY_S))
                        self._check(running, "while the run was under way")
                    self._check(running, "while the run was under way")
                finally:
                    while messages := self.coordinator.messages(0.0):
                        output.pass_on(messages)

        return max(call.result() for call in running)

    def _check(self, calls: Sequence["Future[Any]"], when: str) -> None:
        """Raises the error of a failed call, or WorkerDied if the cause is a process that died or
        does not respond. when: in the run."""
        errors = [call.exception() for call in calls if call.done()]
        error = next(filter(None, errors), None)
        until = time.monotonic()
        if error is not None and not isinstance(error, UserError | TrustError):
            until += STARVED_S  # it may follow from a death that is not known yet

        while True:
            dead = [worker for worker in self._workers if worker.how_it_died()]
            if dead or time.monotonic() >= until:
                break
            time.sleep(_LOOKS_EVERY_S)

        for worker in dead:
            rank = worker.place.rank
            raise WorkerDied(
                f"worker {rank} of {len(calls)}, which generates and trains, has died {when} "
                f"({worker.how_it_died()}): killed from outside, out of memory, or crashed in "
                "native code."
            )

        stacks = self._spec.run_dir / STACKS
        if isinstance(error, PeersLate):
            limit_s = self._spec.config.trainer.peers_timeout_s
            raise hanging(dict(enumerate(calls)), self._calls, stacks, limit_s) or error from error
        if error is not None:
            raise error
        if (silent := self._heartbeat.silent()) is not None:
            raise WorkerDied(self._heartbeat.describe_silence(silent, stacks))


def launch_processes(spec: Spec, options: LaunchOptions = LAUNCH_DEFAULTS) -> Outcome:
    """See `Launch`."""
    with starting(spec, options.allow_change) as start:
        if done := done_before(spec, start, options.say):
            return done

        start.set_aside(spec, options.say)
        options.say(f"starting {count_of(len(spec.plan.ranks), 'process')} on this machine")

        with reported(spec.run_dir, options.say), LocalRun(spec, start) as run:
            try:
                steps = run.watch(run.build(options.say), options)
            except WorkerDied as died:
                raise type(died)(f"{died} {resume_hint(spec)}") from died

        return outcome_of(
            spec,
            steps,
            run.stop.signal,
            run.stop.wanted and not run.coordinator.progress().finished,
        )


def main() -> None:
    """The process of a rank: serves the calls that arrive over its socket."""
    coordinator = Peer(Connection(int(sys.argv[1])), _NUM_CALLS)
    coordinator.serve(LocalWorker(coordinator))
    leave_at_once(1)
