"""A request lane with asynchronous decode steps."""

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distflow.models.cached_decoder import DecoderView, PromptKV
from distflow.models.row_adapters import rows_with
from distflow.rollout.embedded.decode_state import Lease
from distflow.rollout.embedded.decode_steps import AsyncSteps
from distflow.rollout.embedded.page_memory import PageCopy
from distflow.rollout.embedded.prompt_cache import PromptCache
from distflow.rollout.embedded.sampler import NOT_FINITE
from distflow.rollout.embedded.scheduler import (
    DrawnToken,
    Move,
    Prefill,
    Scheduler,
    Sequence,
    StepTokens,
    Work,
)


@dataclass(frozen=True, eq=False)
class _LaunchedStep:
    """A launched step."""

    sequences: list[Sequence]
    leases: list[Lease]
    copied: Tensor
    """Of `DecodeState.draw`, on the host, valid after `done`."""
    done: torch.Event | None


@dataclass(eq=False)
class CudaRequestLane:
    """A `RequestLane` that reads the tokens of a step `AsyncSteps.lag` steps after launching it.

    The host learns late that a sequence has ended, so up to `lag` surplus tokens of it are
    computed, and dropped when read. A sequence at its maximum length is not launched again, so no
    token is written after its last page.
    """

    name: str
    scheduler: Scheduler
    prompts: PromptCache
    decoder: DecoderView
    steps: AsyncSteps
    _leases: dict[Sequence, Lease] = field(init=False, default_factory=dict)
    _launched: deque[_LaunchedStep] = field(init=False, default_factory=deque)
    _loaded: object = field(init=False, default=None)
    """Identifies the weights of the last step."""

    def __post_init__(self) -> None:
        size = self.steps.prefixes.block_tokens
        self.scheduler.num_cached = lambda sequence: size * len(self._found(sequence))

    def leave(self, gone: list[Sequence], moves: list[Move]) -> None:
        """Forget sequences that left the scheduler. No memory moves; the leases of those that ran
        are freed."""
        for sequence in gone:
            if (lease := self._leases.pop(sequence, None)) is not None:
                self.steps.free(lease)
        if not self.scheduler.has_work:
            self._launched.clear()
            self.prompts.clear()

    def forget_kv(self) -> None:
        """Return running sequences to the head of the queue. Launched steps must be read first, or
        they would be lost."""
        assert not self._launched, "steps are in flight"
        self.scheduler.preempt()
        self.prompts.clear()
        self.forget_prefixes()
        for lease in self._leases.values():
            self.steps.free(lease)
        self._leases.clear()

    def forget_prefixes(self) -> None:
        self.steps.forget_prefixes()

    def keep(self, finished: list[Sequence]) -> None:
        """See `RequestLane`. No launched step writes to a kept page: it holds tokens that were read
        before the sequence ended."""
        for sequence in finished:
            if sequence.may_continue and sequence.weights == sequence.weights_with(self._loaded):
                self.steps.keep(self._root(sequence), sequence, self._leases[sequence])

    def _found(self, sequence: Sequence) -> list[int]:
        if sequence.may_continue:
            return self.steps.prefixes.find(self._root(sequence), sequence.context[:-1])
        return []

    def _root(self, sequence: Sequence) -> tuple[object, ...]:
        return (self.name, *sequence.weights_with(self._loaded))

    def step(self, weights: object) -> StepTokens | None:
        """Launch the next step, if any, and read the step launched before the last `lag` steps, if
        any. weights: identifies the decoder's weights."""
        self._loaded = weights
        if self.scheduler.can_prefill():
            self._prefill(self.scheduler.do_prefill(), weights)
        elif unfinished := [
            s for s in self.scheduler.running if self._leases[s].num_drawn < s.params.max_tokens
        ]:
            leases = [self._leases[sequence] for sequence in unfinished]
            self._launch(unfinished, leases, self.steps.decode(unfinished, leases))
        elif self._launched:
            return self.read()

        if len(self._launched) > self.steps.lag:
            return self.read()
        return None

    def read(self) -> StepTokens | None:
        """Wait for the tokens of the oldest unread step, without sequences that ended before. None
        if there is no such step.

        Raises FloatingPointError for logits that are NaN or +inf, or -inf for a whole row.
        """
        if not self._launched:
            return None

        launched = self._launched.popleft()
        if launched.done is not None:
            launched.done.synchronize()
        pairs = zip(launched.sequences, launched.leases, strict=True)
        rows = [
            row
            for row, (sequence, lease) in enumerate(pairs)
            if self._leases.get(sequence) is lease
        ]
        drawn = list[DrawnToken]()
        for finite, token, rollout, sampling, *top in launched.copied[rows].tolist():
            if not finite:
                raise FloatingPointError(NOT_FINITE)
            num_top = len(top) // 2
            ids = [int(each) for each in top[:num_top]]
            drawn.append(DrawnToken(int(token), rollout, sampling, ids, top[num_top:]))

        return StepTokens([launched.sequences[row] for row in rows], drawn)

    def _prefill(self, work: Work, weights: object) -> None:
        leases: list[Lease] = []
        hidden: list[Tensor] = []
        fills: list[tuple[PromptKV, list[PageCopy]]] = []
        for sequence in work.sequences:
            sequence.weights = sequence.weights_with(weights)

        for prefill in work.prefills:
            found = [self._found(starts[0]) for starts in prefill.values()]

            # until the leases take over
            self.steps.pages.share(page for pages in found for page in pages)

            adapters = [starts[0].adapter for starts in prefill.values()]
            with rows_with(adapters, self.decoder.device):
                places = self._places(prefill, found)

            for (forward, row), starts, pages in zip(places, prefill.values(), found, strict=True):
                leased, parts = self.steps.lease(row, starts, pages)
                leases += leased
                fills.append((forward, parts))
                hidden.append(forward.hidden[row].expand(len(starts), -1))

            self.steps.pages.give_back(page for pages in found for page in pages)

        self._leases.update(zip(work.sequences, leases, strict=True))
        self._launch(
            work.sequences,
            leases,
            self.steps.first_draw(fills, torch.cat(hidden), work.sequences, leases),
        )

    def _places(self, prefill: Prefill, found: list[list[int]]) -> list[tuple[PromptKV, int]]:
        """Forward and row of each context. found: pages that hold the start of each."""
        if not any(found):
            weights = next(iter(prefill.values()))[0].weights
            return self.prompts.rows(weights, list(prefill), self.decoder.prefill)

        for pages, starts in zip(found, prefill.values(), strict=True):
            for sequence in starts:
                sequence.num_cached_tokens = self.steps.prefixes.block_tokens * len(pages)

        forward = self.decoder.prefill_after(
            list(prefill), [self.steps.gathered(pages) for pages in found]
        )
        return [(forward, row) for row in range(len(prefill))]

    def _launch(self, sequences: Rows[Sequence], leases: list[Lease], drawn: Tensor) -> None:
        """Have the draws copied to the host after the step, and count one more token for each
        lease."""
        for lease in leases:
            lease.num_drawn += 1

        done = None
        if drawn.device.type != "cpu":
            copied = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True).copy_(
                drawn, non_blocking=True
            )
            done = torch.Event(drawn.device)
            done.record()
        else:
            copied = drawn

        self._launched.append(_LaunchedStep(list(sequences), leases, copied, done))
