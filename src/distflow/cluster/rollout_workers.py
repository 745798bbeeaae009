"""The rollout workers in other processes: which ones run, and which weights each has."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from distflow.runtime.step_metrics import ValidationResults
from distflow.scheduling.groups import Version


class RolloutWorkers:
    """By rank. Workers join on one thread while another calls them. One that dies or does not reply in time is removed;
    the supervisor sees that it is gone."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """note: called with the reason why one was removed, and with other warnings."""
        self.note = note
        self._workers: dict[int, Any] = {}
        self._versions: dict[int, Version] = {}
        self._lock = threading.Lock()

    def join(self, rank: int, worker: Any) -> None:
        """A worker without weights, in place of the one before."""
        with self._lock:
            self._workers[rank] = worker
            self._versions.pop(rank, None)

    def took(self, rank: int, version: Version) -> None:
        """It has loaded the version."""
        with self._lock:
            if rank in self._workers:
                self._versions[rank] = version

    def without(self, version: Version) -> dict[int, Any]:
        """Those that have another version, or none."""
        with self._lock:
            return {rank: worker for rank, worker in self._workers.items() if self._versions.get(rank) != version}

    def with_weights(self) -> dict[int, Any]:
        """Those that have weights at all."""
        with self._lock:
            return {rank: self._workers[rank] for rank in sorted(self._versions)}

    def serving(self) -> dict[int, Any]:
        """Those that have the newest version that any of them has."""
        with self._lock:
            newest = max(self._versions.values(), default=None)
            return {rank: self._workers[rank] for rank in sorted(self._versions) if self._versions[rank] == newest}

    def replies(self, asked: Mapping[int, Any], what: str, timeout_s: float | None) -> dict[int, Any]:
        """Of those that reply. One that does not within `timeout_s` is killed: it may be between two states. Raises
        what a worker raised."""
        with self._lock:
            workers = dict(self._workers)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        replies, waiting = {}, {ref: rank for rank, ref in asked.items()}
        while waiting:
            done, _ = ray.wait(
                list(waiting), timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            for ref in done:
                rank = waiting.pop(ref)
                try:
                    replies[rank] = ray.get(ref)
                except RayTaskError as err:
                    raise err.cause from err
                except RayActorError:
                    self._leave(rank, workers[rank], f"worker {rank} died before it had replied for {what}")
            if not done:
                break
        for rank in waiting.values():
            with suppress(Exception):  # it is gone already
                ray.kill(workers[rank])
            self._leave(
                rank,
                workers[rank],
                f"worker {rank} did not reply for {what} within {timeout_s:g} s "
                "(actor_rollout_ref.rollout.timeout_s), and is killed",
            )
        return replies

    def validate(self, step: int) -> list[ValidationResults]:
        """Each that has the newest weights generates for a part of the validation prompts; another one takes over the
        part of one that dies. Empty where none is left."""
        num_parts, results = len(self.serving()), dict[int, ValidationResults]()
        while len(results) < num_parts:
            left = [part for part in range(num_parts) if part not in results]
            parts = dict(zip(workers := self.serving(), left, strict=False))
            if not parts:
                break
            asked = {rank: workers[rank].validate.remote(step, part, num_parts) for rank, part in parts.items()}
            found = self.replies(asked, f"the validation after step {step}", None)
            results |= {parts[rank]: reply for rank, reply in found.items()}
        if len(results) < max(num_parts, 1):
            self.note(f"no rollout worker is left: no validation after step {step}")
            return []
        return [results[part] for part in range(num_parts)]

    def _leave(self, rank: int, worker: Any, why: str) -> None:
        with self._lock:
            if self._workers.get(rank) is worker:
                del self._workers[rank]
                self._versions.pop(rank, None)
        self.note(why)
