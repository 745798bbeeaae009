"""Replaces rollout workers that die.

The groups that such a worker was generating are lost, and its finished ones that no step has taken:
all are issued again.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from distflow.cluster.remote_calls import (
    COORDINATOR,
    STARTS_WITHIN_S,
    WorkerDied,
    kill,
    reply,
    reply_of,
)
from distflow.runtime.worker_place import Place

MOST_DEATHS = 3
WITHIN_S = 3600.0


@dataclass(frozen=True)
class _Starting:
    rank: int
    worker: Any
    deadline: float


class Replacements:
    """Replaces rollout workers that die. A worker that dies for the fourth time within an hour ends
    the run; so does one that cannot be started when no other is left."""

    def __init__(
        self,
        places: Mapping[int, Place],
        start: Callable[[Place], Any],
        coordinator: Any,
        leader: Any,
    ) -> None:
        """places: of the replaceable workers, by rank. start: creates a worker's actor. leader: the
        worker that sends weights. `starting` has the workers being started, by the reply to
        `build`."""
        self.places = dict(places)
        self._start = start
        self._coordinator = coordinator
        self._leader = leader
        self._deaths: dict[int, deque[float]] = {rank: deque() for rank in places}
        self.starting: dict[Any, _Starting] = {}
        self._given_up = set[int]()

    def begin(self, rank: int, why: str) -> None:
        """Start a replacement for a worker that is gone or treated as gone; its groups go to
        others. Raises WorkerDied."""
        num_groups = reply_of(
            self._coordinator.lose_worker.remote(self.places[rank].generator), COORDINATOR
        )
        self._check(rank, why)
        number = reply_of(self._coordinator.add_worker.remote(str(rank)), COORDINATOR)
        self.places[rank] = replace(self.places[rank], generator=number)
        worker = self._start(self.places[rank])
        self.starting[worker.build.remote()] = _Starting(
            rank, worker, time.monotonic() + STARTS_WITHIN_S
        )
        self._say(
            f"{why} Its {num_groups} prompt groups are issued again, and a replacement is started"
        )

    def ready(self) -> dict[int, Any]:
        """Workers that are ready to run, by rank. Raises WorkerDied, or what one raised while
        building."""
        ready = {}
        for ref in [ref for ref in self.starting if ray.wait([ref], timeout=0)[0]]:
            starting = self.starting.pop(ref)
            try:
                reply(ref)
            except RayActorError:
                self.begin(
                    starting.rank,
                    f"The worker that was started as worker {starting.rank} has died at once.",
                )
            else:
                ready[starting.rank] = starting.worker

        for ref, starting in list(self.starting.items()):
            if time.monotonic() > starting.deadline:
                del self.starting[ref]
                self._give_up(starting)

        return ready

    def connect(self, rank: int, worker: Any) -> None:
        """Connect a running worker: the leader sends it weights, and then it gets groups."""
        self._leader.join.remote(rank, worker)
        self._say(f"worker {rank} runs again")

    def _check(self, rank: int, why: str) -> None:
        deaths = self._deaths[rank]
        now = time.monotonic()
        deaths.append(now)
        while now - deaths[0] > WITHIN_S:
            deaths.popleft()

        if len(deaths) > MOST_DEATHS:
            raise WorkerDied(
                f"worker {rank} has died {len(deaths)} times within {WITHIN_S / 60:g} minutes and "
                "is not replaced again: find the cause (memory, a device, a prompt that crashes "
                f"the engine). The last death: {why}"
            )

    def _give_up(self, starting: _Starting) -> None:
        kill(starting.worker)
        self._given_up.add(starting.rank)
        message = (
            f"no other process could be started as worker {starting.rank} within "
            f"{STARTS_WITHIN_S:g} s: its machine or its device may be gone"
        )
        if self._given_up == set(self.places[starting.rank].generators):
            raise WorkerDied(f"{message}, and no rollout worker is left")
        self._say(f"{message}; the run continues without it")

    def _say(self, message: str) -> None:
        self._leader.note.remote("warning", message)
