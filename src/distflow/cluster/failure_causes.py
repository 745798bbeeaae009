"""Finds the cause if a worker fails or dies, and says where the next start resumes."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from distflow.cluster.coordinator_actor import Progress
from distflow.cluster.heartbeat import hanging
from distflow.cluster.ray_cluster import failed_process
from distflow.cluster.remote_calls import (
    STARVED_S,
    PeersLate,
    WorkerDied,
    WorkerFailed,
    future_of,
)
from distflow.errors import UserError
from distflow.launch.run_end import resume_hint
from distflow.runtime.rollout_loop.engine_watch import STACKS
from distflow.runtime.spec import Spec
from distflow.runtime.worker_place import MissingDevice

_DEATH_IS_REPORTED_WITHIN_S = 2.0
_CAUSES = "killed from outside, out of memory, or crashed in native code."
_THERE = (
    "If the driver has it, provide it on every machine, at the same path or installed; modules on "
    "the PYTHONPATH with which Ray was started there"
)
_SAME = "It lacks a module that the driver has imported: install the same distflow on every machine"
_OF_IMPORTS = ("ModuleNotFoundError", "ImportError", "AttributeError")


class Blame:
    """Finds the cause of a failed call of a run's workers."""

    def __init__(
        self,
        spec: Spec,
        workers: Sequence[Any],
        trainers: Sequence[int],
        coordinator: Any,
    ) -> None:
        """workers: by rank; the caller replaces lost ones. trainers: ranks of the training
        workers."""
        self._spec = spec
        self._workers = workers
        self._training_ranks = trainers
        self._coordinator = coordinator

    def outcome(self, ref: Any, rank: int, timeout_s: float | None = None) -> int | BaseException:
        """The result of the worker's `run`, or the error that ended it: what it raised, WorkerDied
        or WorkerFailed; GetTimeoutError if it has not ended."""
        error: BaseException
        try:
            return int(ray.get(ref, timeout=timeout_s))
        except RayTaskError as err:
            error = err.cause
            error.__cause__ = err
        except RayActorError as err:
            error = self.died(rank, f"while the run was under way{self._in_step()}", err)
            error.__cause__ = err
        except RayError as err:
            error = err

        return error

    def cause_of(self, error: BaseException, running: Mapping[Any, int]) -> WorkerDied | None:
        """The failure of another worker that caused a worker's error, if there is one."""
        training = {ref: rank for ref, rank in running.items() if rank in self._training_ranks}
        if isinstance(error, PeersLate):
            calls = {rank: future_of(ref) for ref, rank in training.items()}
            workers = {rank: self._workers[rank] for rank in running.values()}
            limit_s = self._spec.config.trainer.peers_timeout_s
            return hanging(calls, workers, self._spec.run_dir / STACKS, limit_s)

        return self._death_of_coordinator() or self._death_of_trainer(error, training)

    def _death_of_coordinator(self) -> WorkerDied | None:
        try:
            ray.get(self._coordinator.alive.remote(), timeout=_DEATH_IS_REPORTED_WITHIN_S)
        except RayActorError as err:
            return WorkerDied(f"the coordinator has died ({_process_of(err)}): {_CAUSES}")
        except GetTimeoutError:  # its heartbeat reports it if it is not just slow
            return None

        return None

    def _death_of_trainer(
        self, error: BaseException, training: dict[Any, int]
    ) -> WorkerDied | None:
        """Ray reports a death a moment later. Errors of user code usually have no such cause.
        Errors of others have the same cause as that of the first."""
        within_s = STARVED_S
        if isinstance(error, UserError):
            within_s = _DEATH_IS_REPORTED_WITHIN_S

        until = time.monotonic() + within_s
        while training and time.monotonic() < until:
            done, _ = ray.wait(list(training), timeout=max(until - time.monotonic(), 0.0))
            for ref in done:
                outcome = self.outcome(ref, training.pop(ref))
                if isinstance(outcome, WorkerDied):
                    return outcome

        return None

    def died(
        self, rank: int, when: str, err: RayActorError
    ) -> WorkerDied | WorkerFailed | UserError:
        """The error to raise for a worker without a process."""
        if err.actor_init_failed:  # ended by an exception, which is all that Ray reports
            said = str(err).strip().splitlines()[-1]
            message = f"{self._who(rank, err)} could not be started: {said}"
            if said.startswith(_OF_IMPORTS):
                return UserError(f"{message}\n{_SAME}")
            return WorkerFailed(message)

        plan = self._spec.plan.ranks[rank]
        does = []
        if plan.rollout_nodes:
            does.append("generates")
        if plan.training_nodes:
            does.append("trains")
        return WorkerDied(
            f"worker {rank} of {len(self._workers)}, which {' and '.join(does)}, has died {when} "
            f"({_process_of(err)}): {_CAUSES}"
        )

    def build_failed(self, rank: int, err: RayTaskError) -> Exception:
        """The error to raise if a worker raised before the run began. `err` has its traceback,
        which `--debug` shows."""
        who = self._who(rank, err)
        if isinstance(err.cause, MissingDevice):
            return UserError(f"{who}: {err.cause}")
        if isinstance(err.cause, UserError):
            return UserError(f"{who}: {err.cause}\n{_THERE}")

        return WorkerFailed(
            f"{who} could not build its engines: {type(err.cause).__name__}: {err.cause}"
        )

    def _in_step(self) -> str:
        try:
            asked = self._coordinator.progress.remote()
            progress: Progress = ray.get(asked, timeout=_DEATH_IS_REPORTED_WITHIN_S)
        except (RayActorError, GetTimeoutError):  # which is reported separately
            return ""
        return f", in step {min(progress.version.step + 1, progress.total_steps)}"

    def _who(self, rank: int, err: Exception) -> str:
        """The worker in words, with its process if Ray's message names it."""
        where = re.search(r"pid=(\d+), ip=([^,)]+)", str(err))
        process = f" (pid {where[1]} on {where[2]})" if where else ""
        return f"worker {rank} of {len(self._workers)}{process}"


def _process_of(err: RayActorError) -> str:
    for line in str(err).splitlines():
        if line.strip().startswith("pid:"):
            return line.strip()
    return "pid: unknown"


@contextmanager
def with_resume_hint(spec: Spec) -> Iterator[None]:
    """Adds to the error of a death that ends the run where the next start resumes. If a process of
    Ray itself is gone or stopped, names that as the cause."""
    try:
        yield
    except WorkerDied as died:
        process = failed_process()
        if process:
            message = f"{process}, and the workers with it: {_CAUSES}"
        else:
            message = str(died)
        raise type(died)(f"{message} {resume_hint(spec)}") from died
