"""Whether the processes of a run respond, and which of them hang."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from distflow.cluster import remote_calls
from distflow.cluster.remote_calls import WorkerHangs, future_of, name_of

_AWAY_S = 5.0


def hanging(
    calls: "Mapping[int, Future[Any]]", workers: Mapping[int, Any], stacks: Path, limit_s: float
) -> WorkerHangs | None:
    """Names the training workers that did not reach a collective call within `limit_s`; None if
    they have ended since. calls: their runs, by rank. workers: all running ones, which append the
    stacks of their threads to `stacks`."""
    not_done = wait(calls.values(), remote_calls.STARVED_S).not_done
    late = [rank for rank, call in calls.items() if call in not_done]
    if not late:
        return None

    asked = [future_of(worker.write_stacks.remote(stacks)) for worker in workers.values()]
    where = {rank: future_of(workers[rank].where.remote()) for rank in late}
    answered = wait([*asked, *where.values()], remote_calls.ENDS_WITHIN_S).done

    places = []
    for rank, call in where.items():
        place = call.result() if call in answered else "silent"
        places.append(f"worker {rank} is {place}")

    return WorkerHangs(
        f"{' and '.join(places)}, and has not reached a collective call of all ranks within "
        f"{limit_s:g} s (trainer.peers_timeout_s): a function or a lock does not end, or the rank "
        f"has much more work than others. {_stacks_in('Its stacks are', stacks)}"
    )


def _stacks_in(which: str, stacks: Path) -> str:
    if stacks.exists():
        return f"{which} in {stacks}."
    return "No worker could write its stacks."


class Heartbeat:
    """Repeatedly asks processes whether they respond, on a thread of theirs that does nothing
    else."""

    def __init__(self, actors: Mapping[int, Any]) -> None:
        """actors: by rank."""
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, tuple[Future[Any], float]] = {}
        self._heard = set[int]()
        self._looked = time.monotonic()
        for rank, actor in actors.items():
            self.follow(rank, actor)

    def follow(self, rank: int, actor: Any) -> None:
        self._actors[rank] = actor
        self._asked[rank] = (future_of(actor.alive.remote()), time.monotonic())

    def forget(self, rank: int) -> None:
        self._actors.pop(rank, None)
        self._asked.pop(rank, None)

    def silent(self) -> int | None:
        """The rank of a process that has not responded for too long (`_limit_s`); None if all are
        well."""
        now = time.monotonic()
        away_s = now - self._looked
        self._looked = now

        if away_s > _AWAY_S:  # this process itself was stopped: answers are on their way
            for rank, (asked, since) in self._asked.items():
                self._asked[rank] = (asked, since + away_s)

        for rank, (asked, since) in list(self._asked.items()):
            if asked.done():
                self._heard.add(rank)
                self.follow(rank, self._actors[rank])
            elif now - since > self._limit_s(rank):
                return rank

        return None

    def describe_silence(self, silent: int, stacks: Path) -> str:
        """The message about an unresponsive process, after responding workers have written their
        threads' stacks to `stacks`."""
        workers = [actor for rank, actor in self._actors.items() if rank >= 0 and rank != silent]
        written = [future_of(worker.write_stacks.remote(stacks)) for worker in workers]
        wait(written, remote_calls.ENDS_WITHIN_S)
        return (
            f"{name_of(silent)} has not responded for {self._limit_s(silent):g} s: its process has "
            "not started, is stopped or hangs in native code, or its machine is gone or "
            f"overloaded. {_stacks_in('The stacks of the others are', stacks)}"
        )

    def _limit_s(self, rank: int) -> float:
        """How long it may take to reply. At first it still starts and imports."""
        if rank in self._heard:
            return remote_calls.REPLIES_WITHIN_S
        return remote_calls.STARTS_WITHIN_S
