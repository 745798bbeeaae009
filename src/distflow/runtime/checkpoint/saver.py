"""Saves of one worker, made together with the other ranks: each writes what it holds, the first begins and commits.

A save goes on behind the run: the learning thread takes a copy in memory, a thread of its own writes it. At most one is
under way. Where the run waits for a save anyhow, as at its end, nothing is copied.
"""

import copy
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Final, TypeVar

import torch
from torch import Tensor

from distflow.runtime.checkpoint.checkpoint import CheckpointStore
from distflow.runtime.checkpoint.files import is_all_tensors
from distflow.runtime.checkpoint.folder import CheckpointError
from distflow.runtime.checkpoint.shards import Shards
from distflow.runtime.checkpoint.writing import GivenUp, Writing
from distflow.runtime.wait_log import Waits
from distflow.training.collective import Collective

T = TypeVar("T")

Parts = Iterable[tuple[str, object]]

DEADLINE_S: Final = 300.0
"""How long the rank that commits waits for the parts of the others once its own are written."""

_POLL_S: Final = 0.02
_WHOLE, _WRITING, _FAILED = range(3)


@dataclass(frozen=True)
class _UnderWay:
    step: int
    path: "Future[Path | None]"

    @property
    def at(self) -> int:
        """`_WHOLE`, `_WRITING` or `_FAILED`: of several ranks the highest counts."""
        if not self.path.done():
            return _WRITING
        return _WHOLE if self.path.exception() is None else _FAILED


class Saver:
    """A context manager: left in peace, it finishes the save under way; left by an error, it waits for its own thread
    and for no other rank.

    All ranks make the same calls in the same order, on their learning threads. Where one fails, all raise
    CheckpointError.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Collective,
        on_saved: Callable[[int, Path], None] = lambda step, path: None,
        deadline_s: float = DEADLINE_S,
        waits: Waits | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """on_saved: told, on the rank that commits and its learning thread, of each checkpoint that is whole.
        deadline_s: see `DEADLINE_S`. waits: where it is told that this rank waits; None for nowhere. warn: told why the
        save under way failed where another error ends the run."""
        self._waits = waits or Waits()
        self._store, self._ranks, self._on_saved, self._deadline_s = store, ranks, on_saved, deadline_s
        self._warn = warn
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._let_go = Event()
        self._under_way: _UnderWay | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._let_go.set()
            self._thread.shutdown()  # nothing writes to the folder once the run has left it
            self._tell_alone()

    def save(
        self, step: int, parts: Parts, awaited: Collection[str], metric: float | None = None, *, wait: bool
    ) -> None:
        """Save the parts of this rank. What was under way is finished first.

        awaited: the names of parts of other ranks without which the checkpoint is not whole. metric: see
        `Writing.commit`. wait: the same on all ranks: return when it is whole; else the parts are copied before this
        returns.
        """
        self.finish()
        writing = self._begin(step)
        if wait:
            self._under_way = _UnderWay(step, _settled(lambda: self._write(writing, parts, awaited, metric)))
            self.finish()
        else:
            copied = [(name, _copied(part)) for name, part in parts]
            self._under_way = _UnderWay(step, self._thread.submit(self._write, writing, copied, awaited, metric))

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""
        return self._under_way is not None

    def check(self) -> None:
        """Once a step: tell of the save under way where it is whole by now, raise what it has failed with where it
        has."""
        if self._under_way is not None and self._ranks.max(float(self._under_way.at)) != _WRITING:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one."""
        if self._under_way is None:
            return
        saved = self._under_way
        if not saved.path.done():
            with self._waits("training", f"checkpoint of step {saved.step}", on="its writer"):
                wait_for([saved.path])
        self._under_way = None
        path = self._together(saved.step, saved.path)
        if path is not None:
            self._on_saved(saved.step, path)

    def _tell_alone(self) -> None:
        """What became of the save under way, on this rank, once nobody may be waited for."""
        saved, self._under_way = self._under_way, None
        if saved is None:
            return
        error = saved.path.exception()
        with suppress(OSError):  # the error that ends the run is the one to tell
            if error is None and (path := saved.path.result()) is not None:
                self._on_saved(saved.step, path)
            elif error is not None and not isinstance(error, GivenUp):
                self._warn(str(error))

    def _begin(self, step: int) -> Writing:
        self._together(step, _settled(lambda: self._store.begin(step) if self._ranks.rank == 0 else None))
        return self._together(step, _settled(lambda: self._store.writing(step)))

    def _write(self, writing: Writing, parts: Parts, awaited: Collection[str], metric: float | None) -> Path | None:
        """On any thread. Returns the folder of the checkpoint that is whole, on the rank that commits it."""
        names = []
        for name, part in parts:
            writing.write(name, part)
            names.append(name)
        if self._ranks.rank != 0:
            return None
        deadline = time.monotonic() + self._deadline_s
        return writing.commit(
            [*names, *awaited], metric, lambda: not self._let_go.wait(_POLL_S) and time.monotonic() < deadline
        )

    def _together(self, step: int, outcome: "Future[T]") -> T:
        """What this rank did, once all have done theirs. Raises CheckpointError where one of them failed."""
        if self._ranks.size == 1:
            return outcome.result()
        error = outcome.exception()
        try:
            with self._waits("training", f"checkpoint of step {step}", on="other ranks"):
                told = [why for why in self._ranks.gather(_told(error)) if why is not None]
        except Exception:
            if error is not None:
                raise error from error.__cause__  # it may say why the others are gone
            raise
        if error is not None and not isinstance(error, GivenUp):
            raise error
        if told:
            raise CheckpointError(next(filter(None, told), str(error))) from error
        return outcome.result()


def _told(error: BaseException | None) -> str | None:
    """To the other ranks: None where nothing failed, nothing ("") where another one knows why."""
    if error is None:
        return None
    return "" if isinstance(error, GivenUp) else str(error)


def _settled(call: Callable[[], T]) -> "Future[T]":
    """The outcome of a call that is made here and now."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except CheckpointError as err:
        future.set_exception(err)
    return future


def _copied(part: object) -> object:
    """As it stands, in memory of its own; tensors on the CPU."""
    if isinstance(part, Shards):
        return replace(part, tensors=_copies(part.tensors))
    return _copies(part) if is_all_tensors(part) else copy.deepcopy(part)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they are written: the thread that writes them computes nothing."""
    cpu, packed = torch.device("cpu"), torch.contiguous_format
    return {name: tensor.detach().to(cpu, copy=True, memory_format=packed) for name, tensor in tensors.items()}
