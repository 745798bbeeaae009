"""Finds which worker made a run fail, and says so to the user, with where the next start resumes."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from distflow.cluster import heartbeat
from distflow.cluster.coordinator_actor import Progress
from distflow.cluster.heartbeat import COORDINATOR, ENDS_WITHIN_S, name_of
from distflow.cluster.local_ray import ailing
from distflow.errors import UserError
from distflow.launch.run_setup import open_store
from distflow.runtime.engine_watch import STACKS
from distflow.runtime.spec import Spec

_DEATH_IS_REPORTED_WITHIN_S = 2.0
_STARVED_S = 10.0
"""What a busy machine may need for the same, or to report that others are late as well."""
_CAUSES = "killed from outside, out of memory, or crashed in native code."
_THERE = (
    "If it is there for the process that starts the run: have it on every machine, at the same path or installed, "
    "modules on the PYTHONPATH with which Ray was started there"
)
_SAME = "It lacks what the process that starts the run has imported: install the same distflow on every machine"
_OF_IMPORTS = ("ModuleNotFoundError", "ImportError", "AttributeError")


class WorkerDied(RuntimeError):
    """A worker's process is gone: the run ends, and resumes from its last checkpoint when it is started again."""


class WorkerHangs(WorkerDied):
    """A worker's process is alive, and does not reach the collective call that the other ranks wait in."""


class PeersLate(RuntimeError):
    """Another rank did not reach a collective call in time."""


class WorkerFailed(RuntimeError):
    """A worker raised before the run began, and the user's input is not the cause."""


def reply_of(ref: Any, number: int) -> Any:
    """The reply of the actor of a rank or service. Raises WorkerDied where it is gone or silent."""
    try:
        return ray.get(ref, timeout=heartbeat.ANSWERS_WITHIN_S)
    except (RayActorError, GetTimeoutError) as err:
        raise WorkerDied(f"{name_of(number)}'s process is gone or does not answer ({type(err).__name__}).") from err


class Blame:
    """Finds the cause of a failed call of a run's workers."""

    def __init__(
        self, spec: Spec, workers: Sequence[Any], trainers: Sequence[int], services: Mapping[int, Any]
    ) -> None:
        """workers: by rank; the caller replaces one that is gone. trainers: their ranks. services: the actors that are
        no workers, by the number that stands in place of a rank."""
        self._spec, self._workers, self._training_ranks, self._services = spec, workers, trainers, services

    def result(self, ref: Any, rank: int, timeout_s: float | None = None) -> int:
        """What the worker's `run` returned. Raises what it raised, WorkerDied, WorkerFailed."""
        try:
            return int(ray.get(ref, timeout=timeout_s))
        except RayTaskError as err:
            raise err.cause from err
        except RayActorError as err:
            raise self.died(rank, f"while the run was under way{self._in_step()}", err) from err

    def cause_of(self, error: Exception, running: Mapping[Any, int]) -> WorkerDied | None:
        """The failure of another worker that a worker's error follows from, if there is one."""
        return self._hanging(running) if isinstance(error, PeersLate) else self._death_causing(error, running)

    def _death_causing(self, error: Exception, running: Mapping[Any, int]) -> WorkerDied | None:
        """A worker's error may follow from the death of another, which Ray reports a moment later. An error of the
        user's code mostly does not."""
        for number, actor in self._services.items():
            try:
                ray.get(actor.alive.remote(), timeout=_DEATH_IS_REPORTED_WITHIN_S)
            except RayActorError as err:
                return WorkerDied(f"{name_of(number)} has died ({_process_of(err)}): {_CAUSES}")
            except GetTimeoutError:  # its heartbeat reports it, if it is more than slow
                continue
        training_nodes = {ref: rank for ref, rank in running.items() if rank in self._training_ranks}
        within_s = _DEATH_IS_REPORTED_WITHIN_S if isinstance(error, UserError) else _STARVED_S
        until = time.monotonic() + within_s
        while training_nodes and time.monotonic() < until:
            done, _ = ray.wait(list(training_nodes), timeout=max(until - time.monotonic(), 0.0))
            for ref in done:
                try:
                    self.result(ref, training_nodes.pop(ref))
                except WorkerDied as died:
                    return died
                except Exception:  # it has the same cause
                    continue
        return None

    def _hanging(self, running: Mapping[Any, int]) -> WorkerHangs | None:
        """Those that did not come in time for one that waited; None where they have ended since."""
        training_nodes = [ref for ref, rank in running.items() if rank in self._training_ranks]
        if not training_nodes:
            return None
        _, late = ray.wait(training_nodes, num_returns=len(training_nodes), timeout=_STARVED_S)
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
            f"{' and '.join(places)}, and has not reached a collective call of all ranks within "
            f"{self._spec.options.peers_timeout_s:g} s (trainer.peers_timeout_s): a function or a lock that "
            f"does not end, or a rank with much more to do. Its stacks are in {stacks}."
        )

    def died(self, rank: int, when: str, err: RayActorError) -> WorkerDied | WorkerFailed | UserError:
        """The worker's process is gone."""
        if err.actor_init_failed:  # by an exception, which is all that Ray reports of it
            said = str(err).strip().splitlines()[-1]
            message = f"{self._who(rank, err)} could not be started: {said}"
            return UserError(f"{message}\n{_SAME}") if said.startswith(_OF_IMPORTS) else WorkerFailed(message)
        plan = self._spec.plan.ranks[rank]
        does = " and ".join(
            name for name, nodes in (("generates", plan.rollout_nodes), ("trains", plan.training_nodes)) if nodes
        )
        return WorkerDied(
            f"worker {rank} of {len(self._workers)}, which {does}, has died {when} ({_process_of(err)}): {_CAUSES}"
        )

    def unbuilt(self, rank: int, err: RayTaskError) -> Exception:
        """What a worker raised before the run began. Its traceback is in `err`, which `--debug` shows."""
        who = self._who(rank, err)
        if isinstance(err.cause, UserError):
            return UserError(f"{who}: {err.cause}\n{_THERE}")
        return WorkerFailed(f"{who} could not build its engines: {type(err.cause).__name__}: {err.cause}")

    def _in_step(self) -> str:
        try:
            asked = self._services[COORDINATOR].progress.remote()
            progress: Progress = ray.get(asked, timeout=_DEATH_IS_REPORTED_WITHIN_S)
        except (RayActorError, GetTimeoutError):  # which is reported on its own
            return ""
        return f", in step {min(progress.version.step + 1, progress.total_steps)}"

    def _who(self, rank: int, err: Exception) -> str:
        """With the process, as Ray's own text has it."""
        where = re.search(r"pid=(\d+), ip=([^,)]+)", str(err))
        process = f" (pid {where[1]} on {where[2]})" if where else ""
        return f"worker {rank} of {len(self._workers)}{process}"


def _process_of(err: RayActorError) -> str:
    """As Ray's own text has it."""
    return next((line.strip() for line in str(err).splitlines() if line.strip().startswith("pid:")), "pid: unknown")


@contextmanager
def with_resume_hint(spec: Spec) -> Iterator[None]:
    """A death that ends the run reports where the next start resumes. Where a process of Ray itself is gone or stopped,
    that is the cause."""
    try:
        yield
    except WorkerDied as died:
        message = f"{what}, and the workers with it: {_CAUSES}" if (what := ailing()) else str(died)
        store = open_store(spec)
        where = (
            store.load().path.name if store.exists() else "the start: there is no checkpoint yet (trainer.save_freq)"
        )
        raise type(died)(f"{message} The same command resumes from {where}") from died
