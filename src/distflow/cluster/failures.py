"""Who ended a run that did not end well, as the user is told it, and what the next start does."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from distflow.cluster import heartbeat
from distflow.cluster.coordinator_actor import Standing
from distflow.cluster.heartbeat import COORDINATOR, ENDS_WITHIN_S, name_of
from distflow.cluster.local_ray import ailing
from distflow.errors import UserError
from distflow.runtime.engine_watch import STACKS
from distflow.runtime.run_setup import open_store
from distflow.runtime.spec import Spec

_DEATHS_ARE_TOLD_WITHIN_S = 2.0
_STARVED_S = 10.0
"""What a busy machine may need for the same, or to tell that others are late as well."""
_CAUSES = "killed from outside, out of memory, or crashed in native code."
_THERE = (
    "If it is there for the process that starts the run: have it on every machine, at the same path or installed, "
    "modules on the PYTHONPATH with which Ray was started there"
)
_SAME = "What the process that starts the run has imported, it has not: have the same distflow on every machine"
_OF_IMPORTS = ("ModuleNotFoundError", "ImportError", "AttributeError")


class WorkerDied(RuntimeError):
    """A worker's process is gone: the run ends, and goes on from its last checkpoint when it is started again."""


class WorkerHangs(WorkerDied):
    """A worker's process is there, and does not come to what all ranks do together."""


class PeersLate(RuntimeError):
    """Another rank did not come to what all do together."""


class WorkerFailed(RuntimeError):
    """A worker raised before the run began, and nothing that the user gave is to blame."""


def reply_of(ref: Any, number: int) -> Any:
    """What the actor of a rank (or what stands in its place) answers. Raises WorkerDied where it is gone or silent."""
    try:
        return ray.get(ref, timeout=heartbeat.ANSWERS_WITHIN_S)
    except (RayActorError, GetTimeoutError) as err:
        raise WorkerDied(f"{name_of(number)}'s process is gone or does not answer ({type(err).__name__}).") from err


class Blame:
    """What calls of a run's workers ended in."""

    def __init__(
        self, spec: Spec, workers: Sequence[Any], trainers: Sequence[int], services: Mapping[int, Any]
    ) -> None:
        """workers: by rank; whoever calls puts another in place of one that is gone. trainers: their ranks. services:
        the actors that are no workers, by what stands in place of a rank."""
        self._spec, self._workers, self._learners, self._services = spec, workers, trainers, services

    def result(self, ref: Any, rank: int, timeout_s: float | None = None) -> int:
        """What the worker's `run` returned. Raises what it raised, WorkerDied, WorkerFailed."""
        try:
            return int(ray.get(ref, timeout=timeout_s))
        except RayTaskError as err:
            raise err.cause from err
        except RayActorError as err:
            raise self.died(rank, f"while the run was under way{self._in_step()}", err) from err

    def behind(self, error: Exception, running: Mapping[Any, int]) -> WorkerDied | None:
        """What a worker's error comes of, where that is another worker."""
        return self._hanging(running) if isinstance(error, PeersLate) else self._death_behind(error, running)

    def _death_behind(self, error: Exception, running: Mapping[Any, int]) -> WorkerDied | None:
        """A worker's error may come of the death of one that it needs, which is told a moment later. What the user's
        code raised mostly does not."""
        for number, actor in self._services.items():
            try:
                ray.get(actor.alive.remote(), timeout=_DEATHS_ARE_TOLD_WITHIN_S)
            except RayActorError as err:
                return WorkerDied(f"{name_of(number)} has died ({_process_of(err)}): {_CAUSES}")
            except GetTimeoutError:  # told by its pulse, if it is more than slow
                continue
        training_nodes = {ref: rank for ref, rank in running.items() if rank in self._learners}
        within_s = _DEATHS_ARE_TOLD_WITHIN_S if isinstance(error, UserError) else _STARVED_S
        until = time.monotonic() + within_s
        while training_nodes and time.monotonic() < until:
            done, _ = ray.wait(list(training_nodes), timeout=max(until - time.monotonic(), 0.0))
            for ref in done:
                try:
                    self.result(ref, training_nodes.pop(ref))
                except WorkerDied as died:
                    return died
                except Exception:  # it came of the same
                    continue
        return None

    def _hanging(self, running: Mapping[Any, int]) -> WorkerHangs | None:
        """Those that did not come in time, told by one that waited for them; None where they have ended since."""
        training_nodes = [ref for ref, rank in running.items() if rank in self._learners]
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
            f"{' and '.join(places)}, and has not come to what all ranks do together within "
            f"{self._spec.options.peers_timeout_s:g} s (trainer.peers_timeout_s): a function or a lock that "
            f"does not end, or a rank with much more to do. What it is at stands in {stacks}."
        )

    def died(self, rank: int, when: str, err: RayActorError) -> WorkerDied | WorkerFailed | UserError:
        """The worker's process is gone."""
        if err.actor_init_failed:  # by an exception, which is all that Ray tells of it
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
            asked = self._services[COORDINATOR].standing.remote()
            standing: Standing = ray.get(asked, timeout=_DEATHS_ARE_TOLD_WITHIN_S)
        except (RayActorError, GetTimeoutError):  # which is told by itself
            return ""
        return f", in step {min(standing.version.step + 1, standing.total_steps)}"

    def _who(self, rank: int, err: Exception) -> str:
        """With the process, as Ray's own text has it."""
        where = re.search(r"pid=(\d+), ip=([^,)]+)", str(err))
        process = f" (pid {where[1]} on {where[2]})" if where else ""
        return f"worker {rank} of {len(self._workers)}{process}"


def _process_of(err: RayActorError) -> str:
    """As Ray's own text has it."""
    return next((line.strip() for line in str(err).splitlines() if line.strip().startswith("pid:")), "pid: unknown")


@contextmanager
def told_what_next(spec: Spec) -> Iterator[None]:
    """A death that ends the run says where the next start begins. Where a process of Ray itself is gone or stopped, the
    others died of that."""
    try:
        yield
    except WorkerDied as died:
        told = f"{what}, and the workers with it: {_CAUSES}" if (what := ailing()) else str(died)
        store = open_store(spec)
        where = store.load().path.name if store.exists() else "the start: nothing was saved yet (trainer.save_freq)"
        raise type(died)(f"{told} The same command goes on from {where}") from died
