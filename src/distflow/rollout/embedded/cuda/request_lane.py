"""A request lane with asynchronous decode steps."""

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.models.cached_decoder import DecoderView, PromptKV
from distflow.rollout.embedded.cuda.async_steps import Chain
from distflow.rollout.embedded.cuda.block_manager import Part
from distflow.rollout.embedded.cuda.state import Seat
from distflow.rollout.embedded.kv_cache import PromptCache
from distflow.rollout.embedded.request_lane import Drawn
from distflow.rollout.embedded.sampler import NOT_FINITE
from distflow.rollout.embedded.scheduler import Scheduler, Sequence, Work


@dataclass(frozen=True, eq=False)
class _Launched:
    """A launched step. copied: `(4, rows)` on the host, once `done` is."""

    sequences: list[Sequence]
    seats: list[Seat]
    copied: Tensor
    done: torch.cuda.Event | None


class CudaRequestLane:
    """As `RequestLane`, but the tokens of a step are read `Chain.lag` steps after it was launched.

    The host learns late that a sequence has ended, so that up to `lag` surplus tokens of it are computed, and dropped
    when they are read. A sequence that has reached its maximum length is not launched again, so that no token is
    written after its last page.
    """

    def __init__(
        self,
        name: str,
        chain: Chain,
        decoder: DecoderView,
        max_num_seqs: int,
        max_prefill_tokens: int,
        prompt_cache_tokens: int,
    ) -> None:
        self.name = name
        self.scheduler = Scheduler(max_num_seqs, max_prefill_tokens, chain.num_fitting)
        self.prompts = PromptCache(prompt_cache_tokens)
        self._chain = chain
        self._decoder = decoder
        self._seats: dict[Sequence, Seat] = {}
        self._launched: deque[_Launched] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def can_step(self) -> bool:
        """False if it must wait for pages of the other lane."""
        return bool(self.scheduler.running) or self.scheduler.can_prefill()

    def leave(self, gone: Collection[Sequence]) -> None:
        self.scheduler.remove(gone)
        for sequence in gone:
            if (seat := self._seats.pop(sequence, None)) is not None:
                self._chain.leave(seat)
        if not self.has_work:
            self._launched.clear()
            self.prompts.clear()

    def forget_kv(self) -> None:
        """Running sequences go back to the head of the queue. Launched steps must be read before, or they would be
        lost."""
        assert not self._launched, "steps are in flight"
        self.scheduler.preempt()
        self.prompts.clear()
        for seat in self._seats.values():
            self._chain.leave(seat)
        self._seats.clear()

    def step(self, weights: object) -> Drawn | None:
        """Launch the next step, if there is one, and read the step launched before the last `lag` steps, if there is
        any. weights: identifies the decoder's weights."""
        if self.scheduler.can_prefill():
            self._prefill(self.scheduler.do_prefill(), weights)
        elif unfinished := self._unfinished():
            seats = [self._seats[sequence] for sequence in unfinished]
            self._launch(unfinished, seats, self._chain.decode(unfinished, seats))
        elif self._launched:
            return self.read()
        return self.read() if len(self._launched) > self._chain.lag else None

    def read(self) -> Drawn | None:
        """Of the oldest step that was launched and not read, wait for its tokens; those of sequences that ended before
        are left out. None: there is no such step.

        Raises FloatingPointError for logits that are NaN or +inf, or -inf for a whole row.
        """
        if not self._launched:
            return None
        launched = self._launched.popleft()
        if launched.done is not None:
            launched.done.synchronize()
        pairs = zip(launched.sequences, launched.seats, strict=True)
        rows = [row for row, (sequence, seat) in enumerate(pairs) if self._seats.get(sequence) is seat]
        tokens, rollout, sampling, finite = launched.copied[:, rows].tolist()
        if not all(finite):
            raise FloatingPointError(NOT_FINITE)
        return Drawn([launched.sequences[row] for row in rows], [int(token) for token in tokens], rollout, sampling)

    def _unfinished(self) -> list[Sequence]:
        return [seq for seq in self.scheduler.running if self._seats[seq].num_drawn < seq.params.max_tokens]

    def _prefill(self, work: Work, weights: object) -> None:
        seats: list[Seat] = []
        hidden: list[Tensor] = []
        fills: list[tuple[PromptKV, list[Part]]] = []
        for prefill in work.prefills:
            places = self.prompts.rows(weights, prefill.contexts, self._decoder.prefill)
            for (forward, row), starts in zip(places, prefill.starts, strict=True):
                seated, parts = self._chain.seat(forward, row, starts)
                seats += seated
                fills.append((forward, parts))
                hidden.append(forward.hidden[row].expand(len(starts), -1))
        self._seats.update(zip(work.sequences, seats, strict=True))
        self._launch(work.sequences, seats, self._chain.first_draw(fills, torch.cat(hidden), work.sequences, seats))

    def _launch(self, sequences: Rows[Sequence], seats: list[Seat], drawn: Tensor) -> None:
        """Have the draws copied to the host after the step, and note that each seat has one more."""
        for seat in seats:
            seat.num_drawn += 1
        done = None
        if drawn.is_cuda:
            copied = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True).copy_(drawn, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        else:
            copied = drawn
        self._launched.append(_Launched(list(sequences), seats, copied, done))
