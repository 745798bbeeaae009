"""The scheduler of a request lane: decides, without tensors, which waiting and running sequences
run next.

A step either prefills or decodes. Running sequence number i sits in slot i, so the slots in use are
always the first ones and a decode step computes nothing for an empty slot; when a sequence leaves,
the last ones move into the gaps."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distflow.data.sample import FinishReason, Segment
from distflow.models.row_adapters import RowAdapter
from distflow.rollout.engine import GenerateRequest, SamplingParams
from distflow.rollout.random_draws import sample_key, uniforms


class SamplingLaw(NamedTuple):
    """The `SamplingParams` that shape the distribution: rows with equal parameters are drawn
    together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    num_top: int
    greedy: bool


@dataclass(eq=False)
class Sequence:
    """A sequence that the engine extends, compared by identity; the fields below `token_ids` become
    those of its `Segment`."""

    request: int
    """The call of `generate` that it belongs to."""
    sample: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    law: SamplingLaw
    key: int
    """Of its random stream."""
    num_drawn: int = 0
    """Numbers that it drew from its stream in earlier turns."""
    may_continue: bool = False
    adapter: RowAdapter | None = None
    weights: object = None
    """Identifies the weights of its first keys and values."""
    num_cached_tokens: int = 0
    """Tokens of its prompt found in the prefix cache."""
    token_ids: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    sampling_log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_log_probs: list[list[float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and response so far."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def position(self) -> int:
        """The position of the last token, which is the next one to be fed to the model."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    def weights_with(self, loaded: object) -> tuple[object, ...]:
        """Identifies what computes it while these weights are loaded."""
        return (loaded, self.adapter.number if self.adapter else None)

    def append(self, drawn: "DrawnToken", version: int) -> None:
        self.token_ids.append(drawn.token_id)
        self.rollout_log_probs.append(drawn.rollout_log_prob)
        self.sampling_log_probs.append(drawn.sampling_log_prob)
        self.versions.append(version)
        if self.params.num_top:
            self.top_ids.append(drawn.top_ids[: self.params.num_top])
            self.top_log_probs.append(drawn.top_log_probs[: self.params.num_top])

    def segment(self) -> Segment:
        assert self.finish_reason is not None, "an unfinished sequence has no segment"
        return Segment.drawn(
            self.sample,
            self.token_ids,
            self.rollout_log_probs,
            self.sampling_log_probs,
            self.versions,
            self.finish_reason,
            self.num_cached_tokens,
            top_ids=self.top_ids,
            top_log_probs=self.top_log_probs,
        )


def sequences_of(number: int, request: GenerateRequest) -> list[Sequence]:
    """One sequence per requested sample."""
    law = SamplingLaw(*(getattr(request.params, name) for name in SamplingLaw._fields))
    sequences: list[Sequence] = []
    for sample in request.samples:
        sequence = Sequence(
            request=number,
            sample=sample,
            prompt_ids=request.prompt_ids,
            params=request.params,
            law=law,
            key=sample_key(request.stream, sample),
            num_drawn=request.num_drawn,
            may_continue=request.may_continue,
            adapter=request.adapter,
        )
        sequences.append(sequence)

    return sequences


class DrawInputs(NamedTuple):
    """Inputs of each row's next draw."""

    laws: list[SamplingLaw]
    uniforms: NDArray[np.float64]
    """`(rows,)`, in [0, 1)."""
    contexts: list[tuple[int, ...]]
    """Tokens in prompt or response; empty in rows without a penalty for them."""

    def take(self, rows: list[int]) -> "DrawInputs":
        laws = [self.laws[row] for row in rows]
        contexts = [self.contexts[row] for row in rows]
        return DrawInputs(laws, self.uniforms[rows], contexts)


def draw_inputs(sequences: list[Sequence]) -> DrawInputs:
    keys = np.array([sequence.key for sequence in sequences], dtype=np.uint64)
    positions = np.array(
        [sequence.num_drawn + len(sequence.token_ids) for sequence in sequences], dtype=np.int64
    )
    contexts = [
        sequence.context if sequence.law.repetition_penalty != 1.0 else () for sequence in sequences
    ]

    return DrawInputs([sequence.law for sequence in sequences], uniforms(keys, positions), contexts)


class DrawnToken(NamedTuple):
    """A token, read on the host; log-probs as in `Segment`."""

    token_id: int
    rollout_log_prob: float
    sampling_log_prob: float
    top_ids: list[int]
    """The likeliest tokens, as many as any sequence of the step wants."""
    top_log_probs: list[float]


class StepTokens(NamedTuple):
    """One token per sequence."""

    sequences: list[Sequence]
    drawn: list[DrawnToken]


Move = tuple[int, int]
"""(from slot, to slot)"""

# a prefill for fewer slots than this costs more than leaving them empty for a while
REFILL_FRACTION = 1 / 16


Prefill = dict[tuple[int, ...], list[Sequence]]
"""Distinct contexts of similar lengths and one adapter to run in one forward, each with the
sequences that start from it. Either all or none of them begin with a cached prefix."""


@dataclass(frozen=True)
class Work:
    """One step."""

    prefills: list[Prefill]
    sequences: list[Sequence]
    """Those that get a token, in the order of their slots, starting at `first_slot`."""
    first_slot: int


@dataclass(eq=False)
class Scheduler:
    """Assigns slots in the order of submission."""

    max_num_seqs: int
    max_prefill_tokens: int
    """The most prompt tokens per step; a longer prompt runs alone."""
    num_fitting: Callable[[Iterable[Sequence], int], int] | None = None
    """How many of the first of these sequences fit into memory now, at most the number; None:
    all."""
    num_cached: Callable[[Sequence], int] = lambda sequence: 0
    """Tokens at the start of a sequence's context that need no prefill."""
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_wanted(self) -> int:
        """Slots that all current sequences will need at once."""
        return min(self.max_num_seqs, len(self.running) + len(self.waiting))

    def add(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def schedule(self) -> Work:
        """The next step; there must be work."""
        if self.can_prefill():
            return self.do_prefill()
        assert self.running, "a step needs work"
        return Work([], list(self.running), 0)

    def can_prefill(self) -> bool:
        """Whether enough slots are free to be worth a forward: a fraction of all, or one per
        waiting sequence."""
        if not self.waiting:
            return False
        free = self._num_free()
        enough = max(1, int(self.max_num_seqs * REFILL_FRACTION))
        return free >= min(enough, len(self.waiting)) or (free > 0 and not self.running)

    def do_prefill(self) -> Work:
        """Admit waiting sequences in order; those with the same context share its prefill."""
        starts: dict[RowAdapter | None, Prefill] = {}
        rests: dict[tuple[object, tuple[int, ...]], int] = {}
        num_tokens = 0
        free = self._num_free()
        while self.waiting and free > 0:
            adapter = self.waiting[0].adapter
            context = self.waiting[0].context
            if (adapter, context) not in rests:
                rest = len(context) - self.num_cached(self.waiting[0])
                num_tokens += rest
                if starts and num_tokens > self.max_prefill_tokens:
                    break
                rests[adapter, context] = rest

            own = starts.setdefault(adapter, {})
            own.setdefault(context, []).append(self.waiting.popleft())
            free -= 1

        prefills: list[Prefill] = []
        for adapter, own in starts.items():
            for is_fresh in (True, False):
                longest = 0
                for context in sorted(own, key=lambda each: -rests[adapter, each]):
                    rest = rests[adapter, context]
                    if (rest == len(context)) != is_fresh:
                        continue

                    # In each forward no context is padded to more than twice its length.
                    if 2 * rest < longest or not longest:
                        prefills.append({})
                        longest = rest
                    prefills[-1][context] = own[context]

        admitted = [seq for prefill in prefills for group in prefill.values() for seq in group]
        first_slot = len(self.running)
        self.running.extend(admitted)
        return Work(prefills, admitted, first_slot)

    def _num_free(self) -> int:
        """Slots for waiting sequences."""
        free = self.max_num_seqs - len(self.running)
        if self.num_fitting is None:
            return free
        return self.num_fitting(self.waiting, free)

    def remove(self, gone: Collection[Sequence]) -> list[Move]:
        """Forget finished or aborted sequences; returns which slots move into the gaps."""
        if not gone:
            return []

        gone = set(gone)
        self.waiting = deque(seq for seq in self.waiting if seq not in gone)
        remaining = [slot for slot, seq in enumerate(self.running) if seq not in gone]
        sources = [slot for slot in remaining if slot >= len(remaining)]
        gaps = [slot for slot in range(len(remaining)) if self.running[slot] in gone]
        moves = list(zip(sources, gaps, strict=True))
        for source, gap in moves:
            self.running[gap] = self.running[source]
        del self.running[len(remaining) :]

        return moves

    def begun(self) -> list[Sequence]:
        """Unfinished sequences that have drawn tokens."""
        return [seq for seq in (*self.running, *self.waiting) if seq.token_ids]

    def preempt(self) -> None:
        """Return all running sequences to the head of the queue; their context is prefilled
        again."""
        self.waiting.extendleft(reversed(self.running))
        self.running = []
