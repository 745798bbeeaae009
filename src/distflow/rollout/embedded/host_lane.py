"""Decode steps of the embedded engine on the host."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from distflow.models.cached_decoder import DecoderView, PromptKV
from distflow.models.row_adapters import rows_with
from distflow.rollout.embedded.kv_slots import KeysValues, KVSlots, joined_blocks, num_tokens
from distflow.rollout.embedded.prefix_cache import PrefixCache
from distflow.rollout.embedded.prompt_cache import PromptCache
from distflow.rollout.embedded.sampler import sample
from distflow.rollout.embedded.scheduler import (
    DrawnToken,
    Move,
    Prefill,
    Scheduler,
    Sequence,
    StepTokens,
    Work,
    draw_inputs,
)

PREFIX_BLOCK = 16
PREFIX_CACHE_BYTES = 2**29
"""Size of a lane's prefix cache. It does not depend on the machine, since cache hits affect a
response's last bits."""


@dataclass(eq=False)
class RequestLane:
    """Sequences that are decoded together on the host, with their queue, slots and cached prompts.
    Lanes share nothing, so that requests of one do not affect the batches of another.

    prefixes: keys and values of finished sequences that may continue, under the weights of the last
    step.
    """

    name: str
    scheduler: Scheduler
    prompts: PromptCache
    decoder: DecoderView
    slots: KVSlots = field(init=False, default_factory=KVSlots)
    prefixes: PrefixCache[KeysValues] = field(
        init=False, default_factory=partial(PrefixCache, PREFIX_BLOCK)
    )
    _loaded: object = field(init=False, default=None)
    """Identifies the weights of the last step."""

    def __post_init__(self) -> None:
        self.scheduler.num_cached = lambda sequence: num_tokens(self._found(sequence))

    def leave(self, gone: list[Sequence], moves: list[Move]) -> None:
        """Forget sequences that left the scheduler; after the last one, all memory is dropped."""
        self.slots.move(moves)
        if not self.scheduler.running:
            self.slots.reset()
        if not self.scheduler.has_work:
            self.prompts.clear()

    def forget_kv(self) -> None:
        """Return running sequences, with their tokens, to the head of the queue."""
        self.scheduler.preempt()
        self.prompts.clear()
        self.forget_prefixes()
        self.slots.reset()

    def forget_prefixes(self) -> None:
        self.prefixes.clear()

    def keep(self, finished: list[Sequence]) -> None:
        """Keep finished sequences that may continue later and still have their slots, except those
        that began with other weights, whose keys and values are mixed."""
        kept = set[Sequence]()
        for each in finished:
            if each.may_continue and each.weights == each.weights_with(self._loaded):
                kept.add(each)

        if not kept:
            return

        for slot, sequence in enumerate(self.scheduler.running):
            if sequence in kept:
                kept_tokens = sequence.context[:-1]  # the last token was not fed
                content = self.slots.blocks(slot, len(kept_tokens), PREFIX_BLOCK)
                self.prefixes.add(sequence.weights_with(self._loaded), kept_tokens, content)

        while len(self.prefixes) * PREFIX_BLOCK * self.slots.bytes_per_token > PREFIX_CACHE_BYTES:
            self.prefixes.pop_oldest()

    def step(self, weights: object) -> StepTokens:
        """The next step; there must be work. weights: identifies the decoder's weights."""
        self._loaded = weights
        work = self.scheduler.schedule()
        if work.prefills:
            hidden = self._prefill(work, weights)
        else:
            hidden = self._decode(work)

        draws = sample(self.decoder.logits(hidden), draw_inputs(work.sequences))
        columns = [column.tolist() for column in draws]
        return StepTokens(work.sequences, [*map(DrawnToken, *columns)])

    def read(self) -> None:
        """Nothing to read: each step returns its tokens."""

    def _prefill(self, work: Work, weights: object) -> Tensor:
        """Returns `(rows, hidden)` of the last token of each sequence, in the order of the
        slots."""
        slot = work.first_slot
        hidden = []
        num_tokens_at_most = max(
            len(each.prompt_ids) + each.params.max_tokens for each in work.sequences
        )
        for sequence in work.sequences:
            sequence.weights = sequence.weights_with(weights)

        for prefill in work.prefills:
            places = self._places(prefill)
            places = [
                place
                for place, starts in zip(places, prefill.values(), strict=True)
                for _ in starts
            ]
            for _, run in itertools.groupby(places, key=lambda place: id(place[0])):
                forwards, rows = zip(*run, strict=True)
                self.slots.fill(
                    forwards[0], list(rows), slot, self.scheduler.num_wanted, num_tokens_at_most
                )
                hidden.append(
                    forwards[0].hidden[torch.tensor(rows, device=forwards[0].hidden.device)]
                )
                slot += len(rows)

        return torch.cat(hidden)

    def _places(self, prefill: Prefill) -> list[tuple[PromptKV, int]]:
        """Forward and row of each context."""
        firsts = [starts[0] for starts in prefill.values()]
        found = [self._found(first) for first in firsts]
        with rows_with([first.adapter for first in firsts]):
            if not any(found):
                return self.prompts.rows(firsts[0].weights, list(prefill), self.decoder.prefill)

            for blocks, starts in zip(found, prefill.values(), strict=True):
                for sequence in starts:
                    sequence.num_cached_tokens = num_tokens(blocks)

            forward = self.decoder.prefill_after(
                list(prefill), [joined_blocks(blocks) for blocks in found]
            )

        return [(forward, row) for row in range(len(prefill))]

    def _found(self, sequence: Sequence) -> list[KeysValues]:
        if sequence.may_continue:
            root = sequence.weights_with(self._loaded)
            return self.prefixes.find(root, sequence.context[:-1])
        return []

    def _decode(self, work: Work) -> Tensor:
        """Decode one token of each running sequence; `(rows, hidden)` in the order of the slots."""
        device = self.decoder.device
        positions = [len(each.prompt_ids) + len(each.token_ids) - 1 for each in work.sequences]
        tokens = torch.tensor(
            [sequence.token_ids[-1] for sequence in work.sequences], device=device
        )
        keys, values = self.slots.window(
            len(positions), max(positions) + 1, self.scheduler.num_wanted
        )

        adapters = [sequence.adapter for sequence in work.sequences]
        # a step of a small model takes as long as some calls
        with rows_with(adapters) if any(adapters) else nullcontext():
            return self.decoder.decode(tokens, torch.tensor(positions, device=device), keys, values)
