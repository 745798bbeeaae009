"""Passes the samples of a step from the ranks that write them to those that read them.

Only uids and references are handled here.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ref = TypeVar("Ref")


class ReshardError(RuntimeError):
    """A step that cannot be resharded. The message names the step and the cause."""


class Key(NamedTuple):
    """A step of a queue, counted from 1, generated with the weights of `version`. A queue has one
    consumer."""

    queue: str
    step: int
    version: int

    def __str__(self) -> str:
        return f"step {self.step} of queue '{self.queue}' (version {self.version})"


@dataclass(frozen=True)
class Share(Generic[Ref]):
    """What one rank reads of a step: each sample as (index into `refs`, row of that object), in the
    requested order.

    writers: who put each of `refs`. A rank without samples has one object, for its columns.
    """

    refs: tuple[Ref, ...]
    writers: tuple[int, ...]
    rows: NDArray[np.int32]
    """`(samples, 2)`"""


@dataclass
class _Step(Generic[Ref]):
    """State of a step from the first reservation to the last rank's release."""

    num_writers: int
    reserved: dict[int, int] = field(default_factory=dict)  # reserved bytes by writer
    # uids and object by writer
    puts: dict[int, tuple[Sequence[str], Ref]] = field(default_factory=dict)
    num_ranks: int = 0  # ranks that read it, known after the first pick
    # (writer, row) by uid, after the first pick
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)


class Reshard(Generic[Ref]):
    """A pure state machine; its driver notifies waiting callers.

    Each writer of a step first reserves memory for its samples and then puts them, as one object,
    which may be empty. The step is complete once all have; then each reading rank picks its
    samples. Once every rank has released its share, the step is forgotten and its memory is free.

    Nothing is searched: put and pick cost the same for any number of steps.

    limit_bytes: of all samples reserved and not released (`held_bytes`). The oldest step of a queue
    is admitted even beyond the limit, so that later steps never block one that is awaited."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        # steps in the order of their opening
        self._queues: defaultdict[str, dict[Key, _Step[Ref]]] = defaultdict(dict)

    def reserve(self, key: Key, writer: int, num_writers: int, num_bytes: int) -> bool:
        """Whether the writer may put this many bytes now. Raises ReshardError if it already did, or
        the sizes disagree."""
        steps = self._queues[key.queue]
        step = steps.get(key)
        if step is not None and (step.num_writers != num_writers or not 0 <= writer < num_writers):
            raise ReshardError(
                f"{key} has {step.num_writers} writers, but {writer} of {num_writers} writes to it"
            )
        if step is not None and writer in step.reserved:
            raise ReshardError(f"writer {writer} puts {key} twice")
        is_oldest = not steps or next(iter(steps)) == key
        if not is_oldest and self.held_bytes + num_bytes > self._limit_bytes:
            return False
        if step is None:
            step = steps[key] = _Step(num_writers)
        step.reserved[writer] = num_bytes
        self.held_bytes += num_bytes
        return True

    def put(self, key: Key, writer: int, uids: Sequence[str], ref: Ref) -> None:
        """Put the samples of a writer that has reserved memory for them."""
        step = self._queues[key.queue][key]
        assert writer in step.reserved and writer not in step.puts
        step.puts[writer] = (uids, ref)

    def is_complete(self, key: Key) -> bool:
        """Whether all writers of the step have put their samples."""
        step = self._queues[key.queue].get(key)
        return step is not None and len(step.puts) == step.num_writers

    def pick(self, key: Key, num_ranks: int, uids: Sequence[str]) -> Share[Ref]:
        """The samples of these uids in a complete step, in that order, for one of `num_ranks` that
        each pick theirs.

        If several writers put a sample, as ranks of a tensor-parallel group do, the first one's is
        used. Raises ReshardError for a missing sample, or if ranks disagree on their number.
        """
        step = self._queues[key.queue][key]
        assert self.is_complete(key)
        if not step.num_ranks:
            step.num_ranks = num_ranks
            for writer in sorted(step.puts):
                for row, uid in enumerate(step.puts[writer][0]):
                    step.places.setdefault(uid, (writer, row))
        if step.num_ranks != num_ranks:
            raise ReshardError(
                f"{key} has {step.num_ranks} readers, but one of them says they are {num_ranks}"
            )
        absent = [uid for uid in uids if uid not in step.places]
        if absent:
            raise ReshardError(
                f"{key} has no sample '{absent[0]}', nor {len(absent) - 1} others that are asked "
                "for"
            )
        places = [step.places[uid] for uid in uids]
        # no rank fetches what it does not read
        used = sorted({writer for writer, _ in places}) or [min(step.puts)]
        part_of = {writer: part for part, writer in enumerate(used)}
        rows = np.array([(part_of[writer], row) for writer, row in places], dtype=np.int32).reshape(
            -1, 2
        )
        return Share(tuple(step.puts[writer][1] for writer in used), tuple(used), rows)

    def release(self, key: Key, rank: int) -> None:
        """Note that the rank has its samples; they may be freed."""
        step = self._queues[key.queue][key]
        assert step.num_ranks
        step.released.add(rank)
        if len(step.released) == step.num_ranks:
            self.held_bytes -= sum(step.reserved.values())
            del self._queues[key.queue][key]
