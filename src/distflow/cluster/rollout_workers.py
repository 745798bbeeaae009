"""The workers of other processes that generate for a trainer: who is there, and which weights each has."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from distflow.runtime.validation import ValidationResults
from distflow.scheduling.groups import Version


class Members:
    """By rank. Workers come on one thread, while another asks them; one that dies or does not answer in time is none
    any more, and whoever started it sees that it is gone."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """note: told why one left, and what is wrong with another."""
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
        """It serves the version."""
        with self._lock:
            if rank in self._workers:
                self._versions[rank] = version

    def without(self, version: Version) -> dict[int, Any]:
        """Those that serve another version, or none."""
        with self._lock:
            return {rank: worker for rank, worker in self._workers.items() if self._versions.get(rank) != version}

    def informed(self) -> dict[int, Any]:
        """Those that have weights at all."""
        with self._lock:
            return {rank: self._workers[rank] for rank in sorted(self._versions)}

    def serving(self) -> dict[int, Any]:
        """Those that serve the newest version that any of them does."""
        with self._lock:
            newest = max(self._versions.values(), default=None)
            return {rank: self._workers[rank] for rank in sorted(self._versions) if self._versions[rank] == newest}

    def answers(self, asked: Mapping[int, Any], what: str, timeout_s: float | None) -> dict[int, Any]:
        """Of those that answer. One that does not within `timeout_s` is killed: it may be between two states. Raises
        what a worker raised."""
        with self._lock:
            workers = dict(self._workers)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        answers, waiting = {}, {ref: rank for rank, ref in asked.items()}
        while waiting:
            done, _ = ray.wait(
                list(waiting), timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            for ref in done:
                rank = waiting.pop(ref)
                try:
                    answers[rank] = ray.get(ref)
                except RayTaskError as err:
                    raise err.cause from err
                except RayActorError:
                    self._leave(rank, workers[rank], f"worker {rank} died before it had answered for {what}")
            if not done:
                break
        for rank in waiting.values():
            with suppress(Exception):  # it is gone already
                ray.kill(workers[rank])
            self._leave(
                rank,
                workers[rank],
                f"worker {rank} did not answer for {what} within {timeout_s:g} s "
                "(actor_rollout_ref.rollout.timeout_s), and is killed",
            )
        return answers

    def validate(self, step: int) -> list[ValidationResults]:
        """Each that serves the newest weights answers a part of the validation prompts; the part of one that dies is
        answered by another. Empty where none is left."""
        num_parts, answers = len(self.serving()), dict[int, ValidationResults]()
        while len(answers) < num_parts:
            left = [part for part in range(num_parts) if part not in answers]
            parts = dict(zip(workers := self.serving(), left, strict=False))
            if not parts:
                break
            asked = {rank: workers[rank].validate.remote(step, part, num_parts) for rank, part in parts.items()}
            found = self.answers(asked, f"the validation after step {step}", None)
            answers |= {parts[rank]: reply for rank, reply in found.items()}
        if not answers or len(answers) < num_parts:
            self.note(f"no worker is there that could answer validation prompts: no validation after step {step}")
            return []
        return [answers[part] for part in range(num_parts)]

    def _leave(self, rank: int, worker: Any, why: str) -> None:
        with self._lock:
            if self._workers.get(rank) is worker:
                del self._workers[rank]
                self._versions.pop(rank, None)
        self.note(why)
