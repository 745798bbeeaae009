"""Decode steps of the embedded engine on the host, plain or batch-invariant: then a row's bits depend on its own
request alone.

The rounding of a matrix product depends on its shape, so every batch-invariant product has a fixed shape:

- Decoding runs in batch tiles of a fixed number of slots, the last one padded. Attention runs in blocks
  of the keys (`models/attention.py`), so the length of a row's neighbours does not matter.
- A prompt is prefilled alone.
- Tokens are drawn in tiles of rows with the same sampling parameters.
- A response that lost its keys and values gets its prompt prefilled and its tokens decoded again in the same way.

At the start the engine tests with the model that a row's result is the same at each position of a tile; if not, it
makes tiles smaller, down to single rows.
"""

import itertools
from collections.abc import Callable, Collection
from collections.abc import Sequence as Rows
from functools import partial

import torch
from torch import Tensor

from distflow.models.attention import BLOCK
from distflow.models.cached_decoder import DecoderView, PromptKV
from distflow.rollout.embedded.kv_cache import KVSlots, PromptCache
from distflow.rollout.embedded.sampler import Draws, StepTokens, rows_by_law, sample
from distflow.rollout.embedded.scheduler import LaneLimits, Prefill, Scheduler, Sequence, Work

LARGEST = 32
_TRIED_LAYERS = 64
"""Layers that are tested in all: a model with fewer layers is tested with more rows."""
Feed = Callable[[Sequence], tuple[int, int]]
"""The token that a sequence gives the model next, and its position."""


class BatchTiles:
    """The steps of an engine, in batch tiles of `size` rows."""

    def __init__(self, decoder: DecoderView) -> None:
        self._decoder = decoder
        self.size = LARGEST
        while self.size > 1 and not self._is_same_in_each_place():
            self.size //= 2

    def draw(self, lane: "RequestLane", work: Work, weights: object) -> Draws:
        """The next token of each of the work's sequences. weights: identifies the decoder's weights."""
        hidden = self._prefill(lane, work, weights) if work.prefills else self._decode(lane, _last)
        return self._sample(self._logits(hidden), work.sequences)

    def _prefill(self, lane: "RequestLane", work: Work, weights: object) -> Tensor:
        """Returns `(rows, hidden)` of the last token of each sequence."""
        slot, parts = work.first_slot, []
        for prompt, sequences in itertools.groupby(work.sequences, key=lambda sequence: sequence.prompt_ids):
            count = len(list(sequences))
            [(forward, row)] = lane.prompts.rows(weights, [prompt], self._decoder.prefill)
            lane.slots.fill(forward, [row] * count, slot, lane.scheduler.num_wanted)
            parts.append(forward.hidden[row].expand(count, -1))
            slot += count
        hidden = torch.cat(parts)
        begun = torch.tensor([bool(sequence.token_ids) for sequence in work.sequences], device=hidden.device)
        if not begun.any():
            return hidden
        return torch.where(begun[:, None], self._decode_again(lane)[work.first_slot :], hidden)

    def _decode_again(self, lane: "RequestLane") -> Tensor:
        """Decode again all tokens that running sequences have drawn. A sequence with none, or no more, writes what its
        next step overwrites."""
        for index in range(max(len(sequence.token_ids) for sequence in lane.scheduler.running)):
            hidden = self._decode(lane, partial(_drawn, index))
        return hidden

    def _decode(self, lane: "RequestLane", feed: Feed) -> Tensor:
        """One token of each running sequence; `(rows, hidden)` in the order of the slots."""
        running, device = lane.scheduler.running, self._decoder.device
        fed = [feed(sequence) for sequence in running]
        fed += [(0, 0)] * (-len(fed) % self.size)  # into unused slots
        extents = [self._extent(fed[start : start + self.size]) for start in range(0, len(fed), self.size)]
        keys, values = lane.slots.window(len(fed), max(extents), max(len(fed), lane.scheduler.num_wanted))
        parts = []
        for number, extent in enumerate(extents):
            tile = slice(number * self.size, (number + 1) * self.size)
            tokens, positions = torch.tensor(fed[tile], device=device).unbind(-1)
            memory = keys[:, tile, :, :extent], values[:, tile, :, :extent]
            parts.append(self._decoder.decode(tokens, positions, *memory))
        return torch.cat(parts)[: len(running)]

    @staticmethod
    def _extent(fed: list[tuple[int, int]]) -> int:
        """A multiple of a block, above all positions."""
        return max(position for _, position in fed) // BLOCK * BLOCK + BLOCK

    def _logits(self, hidden: Tensor) -> Tensor:
        tiles = [hidden[start : start + self.size] for start in range(0, len(hidden), self.size)]
        tiles[-1] = torch.cat((tiles[-1], tiles[-1][-1:].expand(self.size - len(tiles[-1]), -1)))
        return torch.cat([self._decoder.logits(tile) for tile in tiles])

    def _sample(self, logits: Tensor, sequences: Rows[Sequence]) -> Draws:
        parts, order = [], []
        for law, rows in rows_by_law([sequence.law for sequence in sequences]).items():
            # Rows of one call decide together how far they look for a nucleus.
            size = 1 if law.top_p < 1.0 else self.size
            for start in range(0, len(rows), size):
                tile = rows[start : start + size]
                filled = tile + tile[-1:] * (size - len(tile))
                drawn = sample(logits[torch.tensor(filled, device=logits.device)], [sequences[row] for row in filled])
                parts.append([column[: len(tile)] for column in drawn])
                order += tile
        back = torch.tensor(order, device=logits.device).argsort()
        return Draws(*(torch.cat(column)[back] for column in zip(*parts, strict=True)))

    @torch.inference_mode()
    def _is_same_in_each_place(self) -> bool:
        """Whether the same row gives the same bits at all positions of a tile, in layers and logits."""
        decoder, slots = self._decoder, KVSlots()
        for step in range(max(4, _TRIED_LAYERS // decoder.num_layers)):
            prompt = tuple((7 * index + 3 + step) % decoder.vocab_size for index in range(1 + step % (BLOCK - 1)))
            forward = decoder.prefill([prompt])
            slots.fill(forward, [0] * self.size, 0, self.size)
            keys, values = slots.window(self.size, BLOCK, self.size)
            tokens = torch.full((self.size,), step, device=decoder.device)
            hidden = decoder.decode(tokens, torch.full_like(tokens, len(prompt)), keys, values)
            if not (_is_one_row(hidden) and _is_one_row(decoder.logits(hidden))):
                return False
        return True


def _is_one_row(rows: Tensor) -> bool:
    return torch.equal(rows, rows[:1].expand_as(rows))


def _last(sequence: Sequence) -> tuple[int, int]:
    return sequence.token_ids[-1], sequence.position


def _drawn(index: int, sequence: Sequence) -> tuple[int, int]:
    """The token of that number, or the last one. Of a sequence without any: one that its first token will overwrite."""
    number = min(index, len(sequence.token_ids) - 1)
    return (sequence.token_ids[number] if sequence.token_ids else 0), len(sequence.prompt_ids) + max(number, 0)


class RequestLane:
    """Sequences that are decoded together on the host, with their queue, slots and cached prompts. Lanes share
    nothing, so that requests of one do not affect the batches of another."""

    def __init__(self, name: str, decoder: DecoderView, tiles: BatchTiles | None, limits: LaneLimits) -> None:
        """tiles: None decodes all sequences in one batch."""
        self.name = name
        self.scheduler = Scheduler(limits.max_num_seqs, limits.max_prefill_tokens)
        self.slots = KVSlots()
        self.prompts = PromptCache(limits.prompt_cache_tokens)
        self._decoder = decoder
        self._tiles = tiles

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def can_step(self) -> bool:
        return self.scheduler.has_work

    def leave(self, gone: Collection[Sequence]) -> None:
        """Forget sequences, finished or aborted; with the last one all memory is dropped."""
        self.slots.move(self.scheduler.remove(gone))
        if not self.has_work:
            self.slots.reset()
            self.prompts.clear()

    def forget_kv(self) -> None:
        """Running sequences go back to the head of the queue, with the tokens that they have."""
        self.scheduler.preempt()
        self.prompts.clear()
        self.slots.reset()

    def step(self, weights: object) -> StepTokens:
        """The next step; there must be work. weights: identifies the decoder's weights."""
        work = self.scheduler.schedule()
        if self._tiles is not None:
            draws = self._tiles.draw(self, work, weights)
        else:
            hidden = self._prefill(work, weights) if work.prefills else self._decode(work)
            draws = sample(self._decoder.logits(hidden), work.sequences)
        return StepTokens(work.sequences, *(column.tolist() for column in draws))

    def read(self) -> None:
        """No step is in flight: each returns its tokens."""

    def _prefill(self, work: Work, weights: object) -> Tensor:
        """Returns `(rows, hidden)` of the last prompt tokens, in the order of the slots."""
        slot, hidden = work.first_slot, []
        num_tokens_at_most = max(len(each.prompt_ids) + each.params.max_tokens for each in work.sequences)
        for prefill in work.prefills:
            for forward, rows in self._rows_of(prefill, weights):
                self.slots.fill(forward, rows, slot, self.scheduler.num_wanted, num_tokens_at_most)
                hidden.append(forward.hidden[torch.tensor(rows, device=forward.hidden.device)])
                slot += len(rows)
        return torch.cat(hidden)

    def _rows_of(self, prefill: Prefill, weights: object) -> list[tuple[PromptKV, list[int]]]:
        """Forwards with the rows to copy from each, a row for each sequence, in order."""
        places = self.prompts.rows(weights, prefill.contexts, self._decoder.prefill)
        places = [place for place, starts in zip(places, prefill.starts, strict=True) for _ in starts]
        runs = itertools.groupby(places, key=lambda place: id(place[0]))
        return [(run[0][0], [row for _, row in run]) for run in (list(group) for _, group in runs)]

    def _decode(self, work: Work) -> Tensor:
        positions, device = [sequence.position for sequence in work.sequences], self._decoder.device
        tokens = torch.tensor([sequence.token_ids[-1] for sequence in work.sequences], device=device)
        keys, values = self.slots.window(len(positions), max(positions) + 1, self.scheduler.num_wanted)
        return self._decoder.decode(tokens, torch.tensor(positions, device=device), keys, values)
