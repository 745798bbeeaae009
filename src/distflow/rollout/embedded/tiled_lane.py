"""Batch-invariant decode steps on the host: a row's bits depend only on its own request.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.models.cached_decoder import DecoderView
from distflow.models.packed_attention import BLOCK
from distflow.rollout.embedded.host_lane import RequestLane
from distflow.rollout.embedded.kv_slots import KVSlots
from distflow.rollout.embedded.sampler import Draws, joined, rows_by_law, sample
from distflow.rollout.embedded.scheduler import (
    DrawInputs,
    Work,
)

LARGEST = 32
_TRIED_LAYERS = 64
"""Layers tested in total: a model with fewer layers is tested with more rows."""


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
