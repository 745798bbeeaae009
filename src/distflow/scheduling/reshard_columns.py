"""Divides the samples of a step over the ranks that read it, and tracks who wrote and who reads which of them.

The division is first even by tokens, then local to nodes. Only metadata is handled here.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from distflow.scheduling.bin_packing import Parts, partition
from distflow.scheduling.data_order import grouped


def divide(
    tokens: Sequence[int],
    num_ranks: int,
    groups: Sequence[int] | None = None,
    homes: Sequence[str] = (),
    nodes: Sequence[str] = (),
) -> Parts:
    """The samples of each rank, ascending. Every sample has one rank, and the same arguments give the same ranks.

    groups: of each sample, if groups must stay whole. homes: the node on which each sample is; nodes: that of each
    rank. If both are given, samples (or groups) of equal token counts are swapped so that as many as possible stay on
    their node; no rank's tokens change. A group's node is that of its first sample."""
    if num_ranks == 1:
        return [list(range(len(tokens)))]
    parts = partition(tokens, num_ranks, groups)
    if not homes or len({*homes, *nodes}) < 2:
        return parts
    of_size: defaultdict[int, list[tuple[int, list[int]]]] = defaultdict(list)  # (rank, samples) of units, by tokens
    for rank, part in enumerate(parts):
        for unit in grouped(part, groups):
            of_size[sum(tokens[sample] for sample in unit)].append((rank, unit))
    moved: Parts = [[] for _ in parts]
    for units in of_size.values():
        for rank, unit in _at_home(units, homes, nodes):
            moved[rank] += unit
    return [sorted(part) for part in moved]


def _at_home(
    units: Sequence[tuple[int, list[int]]], homes: Sequence[str], nodes: Sequence[str]
) -> list[tuple[int, list[int]]]:
    """The same units over the same ranks, as many as possible on their node."""
    free: defaultdict[str, list[int]] = defaultdict(list)  # ranks of a node's slots, in reverse
    for rank, _ in reversed(units):
        free[nodes[rank]].append(rank)
    placed: list[tuple[int, list[int]]] = []
    away: list[list[int]] = []
    for _, unit in units:
        home = free[homes[unit[0]]]
        if home:
            placed.append((home.pop(), unit))
        else:
            away.append(unit)
    left = sorted(rank for ranks in free.values() for rank in ranks)
    return placed + list(zip(left, away, strict=True))


Ref = TypeVar("Ref")


class ReshardError(RuntimeError):
    """A step that cannot be resharded. The message names it, and who is to blame."""


class Key(NamedTuple):
    """A step of a queue, counted from 1, generated with the weights of `version`. A queue has one consumer."""

    queue: str
    step: int
    version: int

    def __str__(self) -> str:
        return f"step {self.step} of queue '{self.queue}' (version {self.version})"


@dataclass(frozen=True)
class SampleInfo:
    """What a selection sees of a sample. Lengths in tokens; node_id: where it is; dict_info: further numbers by
    name."""

    sum_tokens: int
    prompt_length: int
    response_length: int
    uid: str
    node_id: str
    dict_info: Mapping[str, float]


Select = Callable[[SampleInfo], bool]


@dataclass(frozen=True)
class Metas:
    """Metadata of the samples of one put, as columns `(samples,)`; lengths in tokens.

    groups: group of each sample, -1 for none. node_id: where they all are. info: further numbers for a selection.
    """

    prompt_lengths: NDArray[np.int32]
    response_lengths: NDArray[np.int32]
    groups: NDArray[np.int64]
    uids: tuple[str, ...]
    node_id: str = ""
    info: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.uids)

    def sample_infos(self) -> list[SampleInfo]:
        info = {name: column.tolist() for name, column in self.info.items()}
        lengths = zip(self.prompt_lengths.tolist(), self.response_lengths.tolist(), self.uids, strict=True)
        return [
            SampleInfo(prompt + response, prompt, response, uid, self.node_id, {name: info[name][row] for name in info})
            for row, (prompt, response, uid) in enumerate(lengths)
        ]


@dataclass(frozen=True)
class Readers:
    """The ranks that read a queue together; all must pass the same.

    whole_groups: samples of a group go to one rank. nodes: where each rank runs, empty if that does not matter.
    """

    num_ranks: int
    whole_groups: bool = True
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Share(Generic[Ref]):
    """What one rank reads of a step: each sample as (index into `refs`, row of that object), in group order.

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
    reserved: dict[int, int] = field(default_factory=dict)  # bytes by writer
    puts: dict[int, tuple[Metas, Ref]] = field(default_factory=dict)
    readers: Readers | None = None
    shares: list[Share[Ref]] = field(default_factory=list)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # (writer, row) by uid, after the first pick
    released: set[int] = field(default_factory=set)


class Reshard(Generic[Ref]):
    """A pure state machine; its driver notifies those who wait.

    Each of a step's writers first reserves memory for its samples and then puts them, as one object, which may be
    empty. The step is complete once all have, and is then divided over the ranks that read it: evenly by tokens, with
    whole groups if wanted, and with few moves between nodes. The division depends only on the samples, not on the order
    of puts. If the ranks have divided their steps already, each names its samples instead (`pick`). Once every rank has
    released its share, the step is forgotten and its memory is free.

    Samples are ordered by group, then by uid, whoever wrote them: a step keeps its order through a chain of queues with
    other numbers of ranks.

    Nothing is searched: put and take cost the same for any number of steps.

    limit_bytes: of all samples reserved and not released (`held_bytes`). The oldest step of a queue is admitted even
    beyond it, so that later steps never block a step that is waited for."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self._queues: defaultdict[str, dict[Key, _Step[Ref]]] = defaultdict(dict)  # steps in the order of their opening

    def reserve(self, key: Key, writer: int, num_writers: int, num_bytes: int) -> bool:
        """Whether the writer may put so many bytes now. Raises ReshardError if it already did, or passes other
        sizes."""
        steps = self._queues[key.queue]
        step = steps.get(key)
        if step is not None and (step.num_writers != num_writers or not 0 <= writer < num_writers):
            raise ReshardError(f"{key} has {step.num_writers} writers, but {writer} of {num_writers} writes to it")
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

    def put(self, key: Key, writer: int, metas: Metas, ref: Ref) -> None:
        """Put the samples of a writer that has reserved memory for them."""
        step = self._queues[key.queue][key]
        assert writer in step.reserved and writer not in step.puts
        step.puts[writer] = (metas, ref)

    def is_complete(self, key: Key) -> bool:
        """Whether all writers of the step have put their samples."""
        step = self._queues[key.queue].get(key)
        return step is not None and len(step.puts) == step.num_writers

    def take(self, key: Key, rank: int, readers: Readers, select: Select | None = None) -> Share[Ref]:
        """The share of a rank in a complete step, the same one until it is released.

        select: which samples are read at all; the others are freed with the step. The first rank's is used, as all run
        the same pipeline. Raises ReshardError if ranks disagree on the readers.
        """
        step = self._queues[key.queue][key]
        assert self.is_complete(key)
        if step.readers is None:
            step.shares = _divided(step.puts, readers, select)
            step.readers = readers
        if step.readers != readers or not 0 <= rank < readers.num_ranks:
            raise ReshardError(f"{key} is read by {step.readers}, but rank {rank} says {readers}")
        return step.shares[rank]

    def pick(self, key: Key, num_ranks: int, uids: Sequence[str]) -> Share[Ref]:
        """The samples of these uids in a complete step, in that order, for one of `num_ranks` that each pick theirs.

        Of a sample that several writers put, as ranks of a tensor-parallel group do, the first one's is used. Raises
        ReshardError for a missing sample, and if ranks disagree on their number.
        """
        step = self._queues[key.queue][key]
        assert self.is_complete(key)
        if step.readers is None:
            step.readers = Readers(num_ranks)
            for other in sorted(step.puts):
                for row, uid in enumerate(step.puts[other][0].uids):
                    step.places.setdefault(uid, (other, row))
        if step.readers != Readers(num_ranks):
            raise ReshardError(f"{key} is read by {step.readers}, but one of its readers says they are {num_ranks}")
        absent = [uid for uid in uids if uid not in step.places]
        if absent:
            raise ReshardError(f"{key} has no sample '{absent[0]}', nor {len(absent) - 1} others that are asked for")
        objects = [(writer, step.puts[writer][1]) for writer in sorted(step.puts)]
        order = {writer: place for place, (writer, _) in enumerate(objects)}
        return _share([(order[writer], row) for writer, row in map(step.places.__getitem__, uids)], objects)

    def release(self, key: Key, rank: int) -> None:
        """Note that the rank has its samples; they may be freed."""
        step = self._queues[key.queue][key]
        assert step.readers is not None
        step.released.add(rank)
        if len(step.released) == step.readers.num_ranks:
            self.held_bytes -= sum(step.reserved.values())
            del self._queues[key.queue][key]


def _divided(puts: Mapping[int, tuple[Metas, Ref]], readers: Readers, select: Select | None) -> list[Share[Ref]]:
    """One share for each rank, of the samples by group, then by length and text of the uid: "7-2" before "7-10"."""
    objects = [(writer, puts[writer][1]) for writer in sorted(puts)]
    metas = [puts[writer][0] for writer, _ in objects]
    samples = [(part, row) for part, put in enumerate(metas) for row in range(len(put))]
    if select is not None:
        infos = [put.sample_infos() for put in metas]
        samples = [(part, row) for part, row in samples if select(infos[part][row])]
    groups, uids = [put.groups.tolist() for put in metas], [put.uids for put in metas]
    samples.sort(key=lambda at: (groups[at[0]][at[1]], len(uids[at[0]][at[1]]), uids[at[0]][at[1]]))
    tokens = [(put.prompt_lengths.astype(np.int64) + put.response_lengths).tolist() for put in metas]
    group_of = [groups[part][row] for part, row in samples]
    whole = [group if group >= 0 else -1 - place for place, group in enumerate(group_of)]  # of no group: alone
    homes = [metas[part].node_id for part, _ in samples] if readers.nodes else []
    loads = [tokens[part][row] for part, row in samples]
    parts = divide(loads, readers.num_ranks, whole if readers.whole_groups else None, homes, readers.nodes)
    return [_share([samples[i] for i in part], objects) for part in parts]


def _share(samples: Sequence[tuple[int, int]], objects: Sequence[tuple[int, Ref]]) -> Share[Ref]:
    """A share that names only objects with samples of the rank, so that no rank fetches what it does not read."""
    used = sorted({part for part, _ in samples}) or [0]
    places = {part: place for place, part in enumerate(used)}
    rows = np.array([(places[part], row) for part, row in samples], dtype=np.int32).reshape(-1, 2)
    return Share(tuple(objects[part][1] for part in used), tuple(objects[part][0] for part in used), rows)
