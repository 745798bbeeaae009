"""Saves a worker's checkpoints, together with the other ranks: each writes its own parts, the first
begins and commits.

A save is asynchronous: the training thread makes a copy in memory, and a separate thread writes it.
At most one save is in progress. If the run waits for a save anyway, as at its end, nothing is
copied.
"""

import copy
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Final, TypeVar

import torch
from torch import Tensor

from distflow.observe.writing.timing import RANKS, Waits
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore, Writing
from distflow.runtime.checkpoint.files import CheckpointError, Shards, is_all_tensors
from distflow.training.engine import Collective

T = TypeVar("T")

Parts = Iterable[tuple[str, object]]

DEADLINE_S: Final = 300.0
"""How long the committing rank waits for the parts of others after writing its own."""

_POLL_S: Final = 0.02
_WHOLE, _WRITING, _FAILED = range(3)


@dataclass(frozen=True)
class _UnderWay:
    step: int
    path: "Future[Path | None]"

    @property
    def at(self) -> int:
        """`_WHOLE`, `_WRITING` or `_FAILED`; the highest over all ranks counts."""
        if not self.path.done():
            return _WRITING
        if self.path.exception() is None:
            return _WHOLE
        return _FAILED


class Saver(AbstractContextManager["Saver"]):
    """A context manager: a normal exit finishes the save in progress; on an error it waits only for
    its own thread, not for other ranks.

    All ranks make the same calls in the same order, on their training threads. If one fails, all
    raise CheckpointError.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Collective,
        on_saved: Callable[[int, Path], None] = lambda step, path: None,
        waits: Waits | None = None,
        after_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """on_saved: called for each complete checkpoint, on the training thread of the committing
        rank. waits: logs this rank's waits. after_commit: called on the writing thread of the
        committing rank."""
        self._waits = waits or Waits()
        self._store = store
        self._ranks = ranks
        self._on_saved = on_saved
        self._after_commit = after_commit
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._let_go = Event()
        self._under_way: _UnderWay | None = None

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self.finish()
        finally:
            self._let_go.set()
            self._thread.shutdown()  # nothing may write to the folder after the run has left it

    def save(
        self,
        step: int,
        parts: Parts,
        awaited: Collection[str],
        metric: float | None = None,
        *,
        wait: bool,
    ) -> None:
        """Save the parts of this rank. A save in progress is finished first.

        awaited: the names of other ranks' parts that a complete checkpoint needs. metric: see
        `Writing.commit`. wait (the same on all ranks): return when the checkpoint is complete; else
        the parts are copied before this returns."""
        self.finish()
        writing = self._begin(step)

        if wait:
            self._under_way = _UnderWay(
                step, _settled(lambda: self._write(writing, parts, awaited, metric))
            )
            self.finish()
        else:
            copied = [(name, _copied(part)) for name, part in parts]
            self._under_way = _UnderWay(
                step, self._thread.submit(self._write, writing, copied, awaited, metric)
            )

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress; the same on all ranks."""
        return self._under_way is not None

    def check(self) -> None:
        """Once per step: report the save in progress if it is complete; raise its error if it has
        failed."""
        if self._under_way is not None and self._ranks.max(float(self._under_way.at)) != _WRITING:
            self.finish()

    def finish(self) -> None:
        if self._under_way is None:
            return

        save = self._under_way
        if not save.path.done():
            with self._waits("training", f"checkpoint of step {save.step}", on="its writer"):
                wait_for([save.path])

        self._under_way = None
        path = self._together(save.step, save.path)
        if path is not None:
            self._on_saved(save.step, path)

    def _begin(self, step: int) -> Writing:
        self._together(
            step, _settled(lambda: self._store.begin(step) if self._ranks.rank == 0 else None)
        )
        return self._together(step, _settled(lambda: self._store.writing(step)))

    def _write(
        self, writing: Writing, parts: Parts, awaited: Collection[str], metric: float | None
    ) -> Path | None:
        """Runs on any thread. Returns the folder of the complete checkpoint on the committing
        rank."""
        names = []
        for name, part in parts:
            writing.write(name, part)
            names.append(name)

        if self._ranks.rank != 0:
            return None

        deadline = time.monotonic() + DEADLINE_S
        path = writing.commit(
            [*names, *awaited],
            metric,
            lambda: not self._let_go.wait(_POLL_S) and time.monotonic() < deadline,
        )
        self._after_commit()

        return path

    def _together(self, step: int, outcome: "Future[T]") -> T:
        """The result of this rank, after all have finished. Raises CheckpointError if one of them
        failed."""
        if self._ranks.size == 1:
            return outcome.result()

        error = outcome.exception()
        why = None if error is None else str(error)
        try:
            with self._waits("training", f"checkpoint of step {step}", on=RANKS):
                failures = dict.fromkeys(each for each in self._ranks.gather(why) if each)
        except RuntimeError:  # raised by torch.distributed
            if error is not None:
                raise error from error.__cause__  # its cause may say why the others are gone
            raise

        if failures:
            raise CheckpointError("; ".join(failures)) from error
        return outcome.result()


def _settled(call: Callable[[], T]) -> "Future[T]":
    """The outcome of a call that is made immediately."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except CheckpointError as err:
        future.set_exception(err)
    return future


def _copied(part: object) -> object:
    """A copy of the current state, with tensors on the CPU."""
    if isinstance(part, Shards):
        return replace(part, tensors=_copies(part.tensors))
    if is_all_tensors(part):
        return _copies(part)
    return copy.deepcopy(part)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the form to be written: the writing thread computes nothing."""
    cpu = torch.device("cpu")
    packed = torch.contiguous_format
    return {
        name: tensor.detach().to(cpu, copy=True, memory_format=packed)
        for name, tensor in tensors.items()
    }
