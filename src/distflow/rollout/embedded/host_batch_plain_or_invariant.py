"""Decode steps of the embedded engine on the host, plain or batch-invariant: in the latter, a row's
bits depend only on its own request.

The rounding of a matrix product depends on its shape, so every batch-invariant product has a fixed
shape:

- Decoding runs in batch tiles of a fixed number of slots, the last one padded. Attention runs in
  blocks of keys (`models/packed_attention.py`), so the length of a row's neighbours does not
  matter.
- A prompt is prefilled alone.
- Tokens are drawn in tiles of rows with the same sampling parameters.
- For a response that lost its keys and values, the prompt is prefilled and the tokens are decoded
  again the same way.

At the start the engine tests on the model that a row's result is the same at each position of a
tile; if not, it shrinks tiles, down to single rows.
"""

import itertools
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from distflow.models.cached_decoder import DecoderView, PromptKV
from distflow.models.packed_attention import BLOCK
from distflow.rollout.embedded.kv_slots_prompt_and_prefix_cache import (
    KeysValues,
    KVSlots,
    PrefixCache,
    PromptCache,
    joined_blocks,
    num_tokens,
)
from distflow.rollout.embedded.sampler import Draws, joined, rows_by_law, sample
from distflow.rollout.embedded.scheduler import (
    DrawInputs,
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

LARGEST = 32
_TRIED_LAYERS = 64
"""Layers tested in total: a model with fewer layers is tested with more rows."""


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
        init=False, default_factory=partial(PrefixCache, PREFIX_BLOCK, True)
    )
    _root: tuple[object] = field(init=False, default=(None,))

    def __post_init__(self) -> None:
        self.scheduler.num_cached = lambda sequence: num_tokens(self._found(sequence))

    def leave(self, gone: list[Sequence], moves: list[Move]) -> None:
        """Forget sequences that left the scheduler; after the last one, all memory is dropped."""
        self.slots.move(moves)
        if not self.scheduler.has_work:
            self.slots.reset()
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
        kept = {each for each in finished if each.may_continue and each.weights == self._root[0]}
        if not kept:
            return
        for slot, sequence in enumerate(self.scheduler.running):
            if sequence in kept:
                kept_tokens = sequence.context[:-1]  # the last token was not fed
                content = self.slots.blocks(slot, len(kept_tokens), PREFIX_BLOCK)
                self.prefixes.add(self._root, kept_tokens, content)
        while len(self.prefixes) * PREFIX_BLOCK * self.slots.bytes_per_token > PREFIX_CACHE_BYTES:
            self.prefixes.pop_oldest()

    def step(self, weights: object) -> StepTokens:
        """The next step; there must be work. weights: identifies the decoder's weights."""
        self._root = (weights,)
        work = self.scheduler.schedule()
        hidden = self._prefill(work, weights) if work.prefills else self._decode(work)
        draws = self._draw(hidden, draw_inputs(work.sequences))
        return StepTokens(work.sequences, *(column.tolist() for column in draws))

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
            sequence.weights = weights
        for prefill in work.prefills:
            places = self._places(prefill, weights)
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

    def _places(self, prefill: Prefill, weights: object) -> list[tuple[PromptKV, int]]:
        """Forward and row of each context."""
        found = [self._found(starts[0]) for starts in prefill.values()]
        if not any(found):
            return self.prompts.rows(weights, list(prefill), self.decoder.prefill)
        for blocks, starts in zip(found, prefill.values(), strict=True):
            for sequence in starts:
                sequence.num_cached_tokens = num_tokens(blocks)
        forward = self.decoder.prefill_after(
            list(prefill), [joined_blocks(blocks) for blocks in found]
        )
        return [(forward, row) for row in range(len(prefill))]

    def _found(self, sequence: Sequence) -> list[KeysValues]:
        return (
            self.prefixes.find(self._root, sequence.context[:-1]) if sequence.may_continue else []
        )

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
        return self.decoder.decode(tokens, torch.tensor(positions, device=device), keys, values)

    def _draw(self, hidden: Tensor, inputs: DrawInputs) -> Draws:
        return sample(self.decoder.logits(hidden), inputs)


@dataclass(eq=False)
class TiledLane(RequestLane):
    """A request lane whose steps run in batch tiles of `size` rows; see `tile_size`."""

    size: int

    def _prefill(self, work: Work, weights: object) -> Tensor:
        slot = work.first_slot
        parts = []
        for prompt, sequences in itertools.groupby(
            work.sequences, key=lambda sequence: sequence.prompt_ids
        ):
            count = len(list(sequences))
            [(forward, row)] = self.prompts.rows(weights, [prompt], self.decoder.prefill)
            self.slots.fill(forward, [row] * count, slot, self.scheduler.num_wanted)
            parts.append(forward.hidden[row].expand(count, -1))
            slot += count
        hidden = torch.cat(parts)
        begun = torch.tensor(
            [bool(sequence.token_ids) for sequence in work.sequences], device=hidden.device
        )
        if not begun.any():
            return hidden
        # All tokens of running sequences are decoded again. A sequence without further tokens
        # writes what its next step overwrites.
        running = self.scheduler.running
        for index in range(max(len(sequence.token_ids) for sequence in running)):
            again = self._decode_tiles([sequence.input_at(index) for sequence in running])
        return torch.where(begun[:, None], again[work.first_slot :], hidden)

    def _decode(self, work: Work) -> Tensor:
        return self._decode_tiles(
            [(sequence.token_ids[-1], sequence.position) for sequence in work.sequences]
        )

    def _decode_tiles(self, fed: list[tuple[int, int]]) -> Tensor:
        """fed: the token and position of each running sequence."""
        num_running = len(fed)
        device = self.decoder.device
        fed = fed + [(0, 0)] * (-len(fed) % self.size)  # into unused slots
        tiles = [slice(start, start + self.size) for start in range(0, len(fed), self.size)]
        extents = [
            max(position for _, position in fed[tile]) // BLOCK * BLOCK + BLOCK for tile in tiles
        ]
        keys, values = self.slots.window(
            len(fed), max(extents), max(len(fed), self.scheduler.num_wanted)
        )
        parts = []
        for tile, extent in zip(tiles, extents, strict=True):
            tokens, positions = torch.tensor(fed[tile], device=device).unbind(-1)
            memory = keys[:, tile, :, :extent], values[:, tile, :, :extent]
            parts.append(self.decoder.decode(tokens, positions, *memory))
        return torch.cat(parts)[:num_running]

    def _draw(self, hidden: Tensor, inputs: DrawInputs) -> Draws:
        tiles = list(hidden.split(self.size))
        tiles[-1] = torch.cat((tiles[-1], tiles[-1][-1:].expand(self.size - len(tiles[-1]), -1)))
        logits = torch.cat([self.decoder.logits(tile) for tile in tiles])
        parts = []
        order = []
        for law, rows in rows_by_law(inputs.laws).items():
            # The rows of one call share the number of candidates for the nucleus.
            size = 1 if law.top_p < 1.0 else self.size
            for start in range(0, len(rows), size):
                tile = rows[start : start + size]
                filled = tile + tile[-1:] * (size - len(tile))
                drawn = sample(
                    logits[torch.tensor(filled, device=logits.device)], inputs.take(filled)
                )
                parts.append(Draws(*(column[: len(tile)] for column in drawn)))
                order += tile
        return joined(parts, order)


def tile_size(decoder: DecoderView) -> int:
    """The largest batch tile in which the same row gives the same bits at all positions."""
    size = LARGEST
    while size > 1 and not _is_same_in_each_place(decoder, size):
        size //= 2
    return size


@torch.inference_mode()
def _is_same_in_each_place(decoder: DecoderView, size: int) -> bool:
    """Whether a row's bits are the same at each position, in layers and logits."""
    slots = KVSlots()
    for step in range(max(4, _TRIED_LAYERS // decoder.num_layers)):
        prompt = tuple(
            (7 * index + 3 + step) % decoder.vocab_size for index in range(1 + step % (BLOCK - 1))
        )
        slots.fill(decoder.prefill([prompt]), [0] * size, 0, size)
        keys, values = slots.window(size, BLOCK, size)
        tokens = torch.full((size,), step, device=decoder.device)
        hidden = decoder.decode(tokens, torch.full_like(tokens, len(prompt)), keys, values)
        if not all(
            torch.equal(rows, rows[:1].expand_as(rows)) for rows in (hidden, decoder.logits(hidden))
        ):
            return False
    return True
