"""The data plan: what a run draws from its data, in which sizes, and when it saves, validates and
ends; the next group to draw; and the order of the data (epoch and row of each group) and the split
of a step into mini-batches, which are pure functions of the seed, the same on any machine and for
any number of ranks."""

import hashlib
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distflow.scheduling.group_states import TRAIN, DomainCounts, PromptGroup
from distflow.scheduling.row_sampler import RowSampler

EPOCHS = 0
MINI_BATCHES = 1
"""Streams of `keyed_permutation`, one per purpose, so that equal seeds and counts never give equal
orders."""

_WORD = (1 << 64) - 1


def keyed_permutation(num_items: int, seed: int, stream: int, *words: int) -> NDArray[np.int64]:
    """A permutation of `range(num_items)` drawn by counter: it depends only on the arguments.

    It sorts raw 64-bit Philox words (Salmon et al. 2011). Unlike `Generator.permutation`, numpy
    guarantees those on every platform and in every version. At most two `words` distinguish draws
    of one stream. `(num_items,)` int64.
    """
    assert num_items >= 0 and len(words) <= 2, (
        "the counter has room for two words besides the drawing one"
    )
    key = np.array([seed & _WORD, stream], dtype=np.uint64)
    counter = np.array([0, 0, *words, *(0,) * (2 - len(words))], dtype=np.uint64)

    return np.argsort(
        np.random.Philox(key=key, counter=counter).random_raw(num_items), kind="stable"
    )


@lru_cache(maxsize=16)
def epoch_order(
    num_rows: int, seed: int, epoch: int, shuffle: bool, domain: str = ""
) -> NDArray[np.int64]:
    """The rows of one pass over the data, or over a domain's, in the order of the groups:
    `(num_rows,)` int64, read-only."""
    words = [epoch]
    if domain:  # 8 bytes of BLAKE2b, independent of the other domains
        words.append(
            int.from_bytes(hashlib.blake2b(domain.encode(), digest_size=8).digest(), "little")
        )

    if shuffle:
        rows = keyed_permutation(num_rows, seed, EPOCHS, *words)
    else:
        rows = np.arange(num_rows, dtype=np.int64)

    rows.flags.writeable = False
    return rows


def place(
    number: int, num_rows: int, seed: int, shuffle: bool, domain: str = ""
) -> tuple[int, int]:
    """Epoch and row of group `number`, for a data set of `num_rows` rows. For a domain, number and
    row are counted within it."""
    assert number >= 0 and num_rows > 0
    epoch, position = divmod(number, num_rows)
    return epoch, int(epoch_order(num_rows, seed, epoch, shuffle, domain)[position])


def total_steps(num_epochs: int, num_rows: int, consumer_batch: int) -> int:
    """The number of steps of a run that drops nothing: steps cross epoch boundaries, and the last
    one may be short."""
    return -(-num_epochs * num_rows // consumer_batch)


def grouped(items: Iterable[int], groups: Sequence[int] | None) -> list[list[int]]:
    """The items of each group together, ordered by their first ones. groups: of all items; None if
    each is alone."""
    members: dict[int, list[int]] = {}
    for item in items:
        group = item if groups is None else int(groups[item])
        members.setdefault(group, []).append(item)
    return list(members.values())


def minibatches(
    num_samples: int,
    groups: Sequence[int] | None,
    mini_batch_prompts: int,
    seed: int,
    step: int,
    epoch: int,
) -> list[list[int]]:
    """Sample indices of each mini-batch of `mini_batch_prompts` prompt groups; the last may be
    short.

    groups: the group of each sample, with samples in the order of their groups, which must not
    depend on the worker that produced them; None if each sample is its own group. epoch: the pass
    of the update over this step's samples, from 0. The order of the groups is drawn from (seed,
    step, epoch); groups stay whole, and indices ascend within a mini-batch.
    """
    if mini_batch_prompts < 1:
        raise ValueError(f"mini_batch_prompts must be at least 1, not {mini_batch_prompts}")

    assert groups is None or len(groups) == num_samples
    in_group_order = grouped(range(num_samples), groups)
    order = keyed_permutation(len(in_group_order), seed, MINI_BATCHES, step, epoch)

    mini_batches = []
    for start in range(0, len(order), mini_batch_prompts):
        samples = list[int]()
        for group in order[start : start + mini_batch_prompts]:
            samples += in_group_order[group]
        mini_batches.append(sorted(samples))

    return mini_batches


@dataclass(frozen=True)
class DomainPlan:
    """A domain to draw from."""

    name: str
    num_rows: int
    weight: float = 1.0
    """Relative to the others', above 0, read as an exact decimal."""
    group_size: int | None = None
    """Samples per prompt; None for the run's."""


@dataclass(frozen=True)
class Frequency:
    """How often something is due: in steps, epochs or seconds, whichever comes first. 0 or less and
    None mean never."""

    steps: int = 0
    epochs: int | None = None
    secs: float | None = None

    def __bool__(self) -> bool:
        return self.steps > 0 or self.epochs is not None or self.secs is not None


class Timetable:
    """Determines after each step whether something is due. A resumed run continues the checkpoint's
    count; the time between two starts does not count."""

    def __init__(
        self, frequency: Frequency, num_rows: int, num_passed: int = 0, secs: float = 0.0
    ) -> None:
        """num_rows: groups of an epoch. num_passed: as in `is_due`. secs: since it was last due."""
        self._frequency = frequency
        self._num_rows = num_rows
        self._num_passed = num_passed
        self._last = time.monotonic() - secs

    @property
    def secs(self) -> float:
        """Seconds since it was last due, or since the start of the run; 0 if seconds do not
        count."""
        if self._frequency.secs is not None:
            return time.monotonic() - self._last
        return 0.0

    def is_due(self, step: int, num_passed: int, is_last: bool = False) -> bool:
        """Call once after each step. num_passed: groups consumed or dropped so far. is_last: no
        step is left, so it is due unless the frequency is never."""
        frequency = self._frequency
        before = self._num_passed
        self._num_passed = num_passed
        size = self._num_rows * (frequency.epochs or 0)
        by_steps = frequency.steps > 0 and step % frequency.steps == 0
        by_epochs = size > 0 and num_passed // size > before // size
        by_secs = frequency.secs is not None and self.secs >= frequency.secs
        if due := by_steps or by_epochs or by_secs or (is_last and bool(frequency)):
            self._last = time.monotonic()
        return due


@dataclass(frozen=True)
class DataPlan:
    """What a run draws from its data, and when it ends: after `total_groups` or `total_steps`,
    whichever comes first."""

    num_rows: int
    consumer_batch: int
    """Prompt groups per step."""
    group_size: int
    """Samples per prompt."""
    total_groups: int | None
    """None: the data are repeated as often as the steps need."""
    total_steps: int
    seed: int = 1
    shuffle: bool = True
    sampler: str | None = None
    """The user's function that chooses the rows, in place of the order by the seed."""
    max_staleness: int = 0
    """Largest age of a token's weights, in steps, when it is trained on."""
    max_concurrent: int | None = None
    """Groups that may run at once; None for as many as staleness allows."""
    max_num_gen_batches: int | None = None
    """Generation budget of a step, in batches."""
    when_exhausted: Literal["error", "continue"] = "error"
    oversampling: Fraction = Fraction(0)
    """Extra groups that run, as a fraction of those that the step lacks."""
    max_held_bytes: int | None = None
    """Of groups that wait for their step or are trained on; None for no bound."""
    domains: tuple[DomainPlan, ...] = ()
    """In the order of their rows, empty for one source. Each repeats separately, so that with them
    `total_groups` is None."""
    saves: Frequency = Frequency()
    """When the run saves a checkpoint, besides at its end."""
    validates: Frequency = Frequency()
    stop_when: str | None = None
    """The metric's condition that ends it earlier."""
    loads_rows: bool = False
    """Groups are only loaded, so that those that start or complete together have one record in the
    ledger."""

    def __post_init__(self) -> None:
        assert not self.domains or (self.total_groups is None and self.sampler is None)
        assert sum(source.num_rows for source in self.sources) == self.num_rows
        assert min(self.num_rows, self.consumer_batch, self.group_size) > 0
        assert self.max_num_gen_batches is None or self.max_num_gen_batches > 0
        assert self.oversampling >= 0 and not (self.oversampling and self.max_staleness)

    @property
    def sources(self) -> tuple[DomainPlan, ...]:
        """The domains, or the only source, without a name."""
        return self.domains or (DomainPlan("", self.num_rows),)

    @property
    def shares(self) -> Sequence[Fraction]:
        """Share of each source, exact; they sum to 1."""
        weights = [Fraction(str(source.weight)) for source in self.sources]
        return [weight / sum(weights) for weight in weights]


class NextGroups:
    """Makes the next groups, from offered rows, else from the data set.

    num_offered: groups of offered rows so far. offered: rows that wait for rollout capacity.
    data_open: whether the data set still has groups."""

    def __init__(
        self,
        plan: DataPlan,
        counts: defaultdict[str, DomainCounts],
        num_offered: int,
        sampler: dict[str, Any] | None = None,
    ) -> None:
        """counts: of the run, by domain; the caller counts the groups that `next` made before it
        calls it again. sampler: what it saved."""
        self._plan = plan
        self._counts = counts
        self.num_offered = num_offered
        self.offered = deque[int]()
        self.data_open = True
        self.sampler: RowSampler | None = None
        if plan.sampler is not None:
            self.sampler = RowSampler(plan.sampler, plan.num_rows, plan.seed, sampler)

    def offer(self) -> int:
        """A number for a row that is not in the data set. Not allowed in a run with domains, which
        have all slots."""
        assert not self._plan.domains
        row = self._plan.num_rows + self.num_offered + len(self.offered)
        self.offered.append(row)
        return row

    @property
    def num_waiting(self) -> int:
        """The number of offered rows without a group."""
        return len(self.offered)

    @property
    def num_left(self) -> int | None:
        """Groups that may still be made; None for no bound."""
        if not self.data_open:
            return len(self.offered)
        if self._plan.total_groups is None:
            return None
        return len(self.offered) + max(0, self._plan.total_groups - self._position(0))

    def next(self, sources: Sequence[int], engine_version: int) -> list[PromptGroup]:
        """The next new groups, one of each source in turn; fewer if the data end. Offered rows, in
        their order, come before those of the data set."""
        positions = [self._position(source) for source in range(len(self._plan.sources))]
        number = self._num_issued
        groups = list[PromptGroup]()
        chosen = sources[: self.num_left]
        drawn = deque[tuple[int, int]]()
        if self.sampler is not None:
            drawn.extend(self.sampler.draw(max(0, len(chosen) - len(self.offered))))

        for source in chosen:
            if self.offered:
                row = self.offered.popleft()
                self.num_offered += 1
                group = PromptGroup(number, 0, row, self._plan.group_size, engine_version)
            elif drawn:
                epoch, row = drawn.popleft()
                group = PromptGroup(number, epoch, row, self._plan.group_size, engine_version)
            else:
                group = self._from_data(number, source, positions[source], engine_version)
                positions[source] += 1

            groups.append(group)
            number += 1

        return groups

    def _from_data(
        self, number: int, source: int, position: int, engine_version: int
    ) -> PromptGroup:
        """A group of the data set. position: in the order of its source."""
        plan = self._plan
        own = plan.sources[source]
        epoch, row = place(position, own.num_rows, plan.seed, plan.shuffle, own.name)
        if not plan.domains:
            return PromptGroup(number, epoch, row, plan.group_size, engine_version)

        row += sum(other.num_rows for other in plan.domains[:source])
        size = own.group_size or plan.group_size
        stream = f"{TRAIN}/{own.name}"
        return PromptGroup(
            number, epoch, row, size, engine_version, stream=stream, position=position
        )

    def _position(self, source: int) -> int:
        """Groups of the source made from rows of the data set."""
        issued = self._counts[self._plan.sources[source].name].issued
        return issued - self.num_offered  # there are no offered rows with domains

    @property
    def _num_issued(self) -> int:
        return sum(counts.issued for counts in self._counts.values())
