"""Passes the samples of a step from the ranks that write them to those that read them.

Only uids and references are handled here.
"""

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
    """State of a step from the first put to the last rank's release."""

    num_writers: int
    puts: dict[int, tuple[Sequence[str], Ref]] = field(default_factory=dict)
    """Uids and object by writer."""
    num_ranks: int = 0
    """Ranks that read it, known after the first pick."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(writer, row) by uid, after the first pick."""
    released: set[int] = field(default_factory=set)


class Reshard(Generic[Ref]):
    """A pure state machine; its driver notifies waiting callers.

    Each writer of a step puts its samples, as one object, which may be empty. The step is complete
    once all have; then each reading rank picks its samples. Once every rank has released its share,
    the step is forgotten. No rank begins a step before all have released the one before, so that
    little more than one is held.
    """

    def __init__(self) -> None:
        self._steps: dict[Key, _Step[Ref]] = {}

    def put(self, key: Key, writer: int, num_writers: int, uids: Sequence[str], ref: Ref) -> None:
        """Put the samples of a writer. Raises ReshardError if it already did, or writers disagree
        on their number."""
        step = self._steps.setdefault(key, _Step(num_writers))
        if step.num_writers != num_writers or writer in step.puts:
            raise ReshardError(
                f"writer {writer} of {num_writers} puts {key}, which has {step.num_writers} "
                f"writers, of which {sorted(step.puts)} have put"
            )

        step.puts[writer] = (uids, ref)

    def is_complete(self, key: Key) -> bool:
        """Whether all writers of the step have put their samples."""
        step = self._steps.get(key)
        return step is not None and len(step.puts) == step.num_writers

    def pick(self, key: Key, num_ranks: int, uids: Sequence[str]) -> Share[Ref]:
        """The samples of these uids in a complete step, in that order, for one of `num_ranks` that
        each pick theirs.

        If several writers put a sample, as ranks of a tensor-parallel group do, the first one's is
        used. Raises ReshardError for a missing sample, or if ranks disagree on their number.
        """
        step = self._steps[key]
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
        step = self._steps[key]
        assert step.num_ranks
        step.released.add(rank)
        if len(step.released) == step.num_ranks:
            del self._steps[key]
