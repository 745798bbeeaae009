"""Calls of a run's actors: replies and errors, in messages of bounded size, and whether the actors respond.

The actors are Ray's, or processes of the local launcher (`socket_calls.py`), which needs no Ray.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

REPLIES_WITHIN_S = 60.0
STARTS_WITHIN_S = 300.0
ENDS_WITHIN_S = 20.0
STARVED_S = 10.0
"""What a busy machine may need to report a death, or that others are late as well."""
COORDINATOR, EXCHANGE, FIRST_REWARD_ACTOR = -1, -2, -3
"""In place of a rank; further reward actors have lower numbers."""
MOST_TEXT = 2000
"""Characters of a text that is sent to the coordinator or the driver."""

_AWAY_S = 5.0


class WorkerDied(RuntimeError):
    """A worker's process is gone: the run ends, and resumes from its last checkpoint when it is started again."""

    exit_status = 75  # EX_TEMPFAIL of sysexits(3): the job of `slurm.sbatch` is requeued


class WorkerHangs(WorkerDied):
    """A worker's process is alive, and does not reach the collective call that the other ranks wait in."""


class PeersLate(RuntimeError):
    """Another rank did not reach a collective call in time."""


class WorkerFailed(RuntimeError):
    """A worker raised before the run began, and the user's input is not the cause."""


def name_of(number: int) -> str:
    """number: a rank, or what stands in place of one."""
    if number <= FIRST_REWARD_ACTOR:
        return f"actor {FIRST_REWARD_ACTOR - number} of the reward actors"
    return {COORDINATOR: "the coordinator", EXCHANGE: "the exchange"}.get(number, f"worker {number}")


def future_of(ref: Any) -> "Future[Any]":
    """Of the result of an actor's call."""
    return ref if isinstance(ref, Future) else ref.future()


def reply(ref: Any) -> Any:
    """Wait for the result of an actor's call. Raises what the actor raised."""
    if isinstance(ref, Future):
        return ref.result()
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as err:
        raise err.cause from err


def reply_of(ref: Any, number: int) -> Any:
    """The reply of the Ray actor of a rank or service. Raises WorkerDied where it is gone or silent."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        return ray.get(ref, timeout=REPLIES_WITHIN_S)
    except (RayActorError, GetTimeoutError) as err:
        raise WorkerDied(f"{name_of(number)}'s process is gone or does not reply ({type(err).__name__}).") from err


def kill(actor: Any) -> None:
    """Kill the process of a Ray actor, if there is one still."""
    import ray

    with suppress(Exception):  # Ray itself may be what has failed
        ray.kill(actor)


def shortened(text: str) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text):,} characters)"


def shorten(error: BaseException) -> None:
    """Shorten the message of an exception, and of its causes."""
    link: BaseException | None = error
    while link is not None:
        link.args = tuple(shortened(arg) if isinstance(arg, str) else arg for arg in link.args)
        link = link.__cause__ or link.__context__


def hanging(
    calls: "Mapping[int, Future[Any]]", workers: Mapping[int, Any], stacks: Path, limit_s: float
) -> WorkerHangs | None:
    """Names the training workers that did not come to a collective call within `limit_s`; None where they have ended
    since. calls: their runs, by rank. workers: all that run, which append the stacks of their threads to `stacks`."""
    not_done = wait(calls.values(), STARVED_S).not_done
    late = [rank for rank, call in calls.items() if call in not_done]
    if not late:
        return None
    asked = [future_of(worker.write_stacks.remote(stacks)) for worker in workers.values()]
    where = {rank: future_of(workers[rank].where.remote()) for rank in late}
    answered = wait([*asked, *where.values()], ENDS_WITHIN_S).done
    places = [f"worker {rank} is {each.result() if each in answered else 'silent'}" for rank, each in where.items()]
    return WorkerHangs(
        f"{' and '.join(places)}, and has not reached a collective call of all ranks within {limit_s:g} s "
        "(trainer.peers_timeout_s): a function or a lock does not end, or the rank has much more work than others. "
        f"Its stacks are in {stacks}."
    )


class Heartbeat:
    """Asks processes again and again whether they respond, on a thread of theirs that does nothing else."""

    def __init__(self, actors: Mapping[int, Any]) -> None:
        """actors: by rank."""
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, tuple[Future[Any], float]] = {}
        self._heard = set[int]()
        self._looked = time.monotonic()
        for rank, actor in actors.items():
            self.follow(rank, actor)

    def follow(self, rank: int, actor: Any) -> None:
        """Ask it from now on."""
        self._actors[rank] = actor
        self._asked[rank] = (future_of(actor.alive.remote()), time.monotonic())

    def forget(self, rank: int) -> None:
        """Stop asking it."""
        self._actors.pop(rank, None)
        self._asked.pop(rank, None)

    def silent(self) -> int | None:
        """The rank of one that has not responded for too long (`_limit_s`), if there is one."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if now - before > _AWAY_S:  # this process itself was stopped: answers are on their way
            self._asked = {rank: (asked, since + now - before) for rank, (asked, since) in self._asked.items()}
        for rank, (asked, since) in list(self._asked.items()):
            if asked.done():
                self._heard.add(rank)
                self.follow(rank, self._actors[rank])
            elif now - since > self._limit_s(rank):
                return rank
        return None

    def describe_silence(self, silent: int, stacks: Path) -> str:
        """The message about a silent process, after every worker that still responds has written its threads' stacks
        to `stacks`."""
        workers = [actor for rank, actor in self._actors.items() if rank >= 0 and rank != silent]
        wait([future_of(worker.write_stacks.remote(stacks)) for worker in workers], ENDS_WITHIN_S)
        return (
            f"{name_of(silent)} has not responded for {self._limit_s(silent):g} s: its process is stopped, hangs in "
            f"native code, or its machine is gone. The stacks of the others are in {stacks}."
        )

    def _limit_s(self, rank: int) -> float:
        """How long it may take to reply. The first time it still starts and imports."""
        return REPLIES_WITHIN_S if rank in self._heard else STARTS_WITHIN_S
