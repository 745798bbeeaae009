"""Replaces rollout workers that die. Only the groups that one was generating are lost, and they are issued again."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from distflow.cluster import heartbeat
from distflow.cluster.failures import WorkerDied, reply_of
from distflow.cluster.heartbeat import COORDINATOR
from distflow.runtime.rank_info import Place

MOST_DEATHS = 3
WITHIN_S = 3600.0


@dataclass(frozen=True)
class _Coming:
    rank: int
    worker: Any
    deadline: float


class Replacements:
    """Of one run. A worker that dies for the fourth time within an hour ends the run; so does one that cannot be
    started while no other is left."""

    def __init__(
        self, places: Mapping[int, Place], start: Callable[[Place], Any], coordinator: Any, leader: Any
    ) -> None:
        """places: of the workers that may be replaced, by rank. start: makes a worker's actor. leader: the worker that
        sends weights."""
        self._places, self._start = dict(places), start
        self._coordinator, self._leader = coordinator, leader
        self._deaths: dict[int, deque[float]] = {rank: deque() for rank in places}
        self._coming: dict[Any, _Coming] = {}
        self._given_up = set[int]()

    @property
    def ranks(self) -> list[int]:
        """Of the workers that may be replaced."""
        return list(self._places)

    def __contains__(self, rank: int) -> bool:
        return rank in self._places

    def begin(self, rank: int, why: str) -> None:
        """Start another worker in place of one that is gone or counts as gone; its groups go to others. Raises
        WorkerDied."""
        num_groups = reply_of(self._coordinator.lose.remote(self._places[rank].generator), COORDINATOR)
        self._check(rank, why)
        number = reply_of(self._coordinator.join.remote(str(rank)), COORDINATOR)
        self._places[rank] = replace(self._places[rank], generator=number)
        worker = self._start(self._places[rank])
        self._coming[worker.build.remote()] = _Coming(rank, worker, time.monotonic() + heartbeat.STARTS_WITHIN_S)
        self._say(f"{why} The {num_groups} prompt groups that it had are issued again; another is started in its place")

    def come(self) -> dict[int, Any]:
        """Workers that are ready to run, by rank. Raises WorkerDied, or what one raised when it was built."""
        ready = {}
        done, _ = ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0) if self._coming else ([], [])
        for ref in done:
            coming = self._coming.pop(ref)
            try:
                ray.get(ref)
            except RayTaskError as err:
                raise err.cause from err
            except RayActorError:
                self.begin(coming.rank, f"The worker that was started as worker {coming.rank} has died at once.")
            else:
                ready[coming.rank] = coming.worker
        for ref, coming in list(self._coming.items()):
            if time.monotonic() > coming.deadline:
                del self._coming[ref]
                self._give_up(coming)
        return ready

    def welcome(self, rank: int, worker: Any) -> None:
        """It runs: the leader sends it weights, and then it gets groups."""
        self._leader.join.remote(rank, worker)
        self._say(f"worker {rank} runs again")

    def kill(self) -> None:
        """Kill the workers that are starting."""
        for coming in self._coming.values():
            _kill(coming.worker)

    def _check(self, rank: int, why: str) -> None:
        deaths, now = self._deaths[rank], time.monotonic()
        deaths.append(now)
        while now - deaths[0] > WITHIN_S:
            deaths.popleft()
        if len(deaths) > MOST_DEATHS:
            raise WorkerDied(
                f"worker {rank} has died {len(deaths)} times within {WITHIN_S / 60:g} minutes and is not replaced "
                f"again: see what kills it (memory, a device, a prompt that crashes the engine). The last time: {why}"
            )

    def _give_up(self, coming: _Coming) -> None:
        _kill(coming.worker)
        self._given_up.add(coming.rank)
        message = (
            f"no other process could be started as worker {coming.rank} within {heartbeat.STARTS_WITHIN_S:g} s: its "
            "machine or its device may be gone"
        )
        if self._given_up == set(self._places[coming.rank].generators):
            raise WorkerDied(f"{message}, and no rollout worker is left")
        self._say(f"{message}; the run continues without it")

    def _say(self, message: str) -> None:
        self._leader.note.remote("warning", message)


def _kill(worker: Any) -> None:
    with suppress(Exception):  # it is gone already
        ray.kill(worker)
