"""Keys and values of running sequences, in slots."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distflow.models.cached_decoder import PromptKV
from distflow.rollout.embedded.scheduler import Move

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of some tokens of a sequence, `(layers, kv_heads, tokens, head_dim)`."""

EXTENT_BLOCK = 32
# initial extent, if sequences may need it: growing costs more than unused memory
FIRST_EXTENT = 128


class KVSlots:
    """`keys`, `values`: `(layers, slots, kv_heads, extent, head_dim)`.

    The tensors have the extent of the longest sequence, and slots for running and waiting
    sequences, so that attention reads contiguous memory. They grow as needed, drop unused slots,
    and shrink to nothing at `reset`. Memory that was never written is zero: attention masks it, but
    a NaN in it would still spread. Inference tensors may be written only in inference mode, and
    aborts move slots outside of steps: hence the decorators.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.keys = self.values = torch.empty(0, 0, 0, 0, 0)
        self._least = 0  # minimum number of tokens to have room for

    @torch.inference_mode()
    def fill(
        self,
        prompts: PromptKV,
        rows: list[int],
        first_slot: int,
        num_wanted: int,
        num_tokens_at_most: int = 0,
    ) -> None:
        """Copy the prompts' rows into consecutive slots. num_wanted: slots known to be needed soon.
        num_tokens_at_most: the most tokens that one of these sequences may reach."""
        longest = prompts.keys.shape[-2]
        end = first_slot + len(rows)

        if self.keys.numel() == 0:
            num_layers, _, num_kv_heads, _, head_dim = prompts.keys.shape
            self.keys, self.values = (
                memory.new_empty(num_layers, 0, num_kv_heads, 0, head_dim)
                for memory in (prompts.keys, prompts.values)
            )

        self._least = max(self._least, min(num_tokens_at_most, FIRST_EXTENT))

        # other sequences may be longer
        self._fit(end, max(longest, self.keys.shape[-2]), num_wanted)
        index: slice | Tensor = slice(rows[0], rows[-1] + 1)  # without a copy
        if rows != list(range(rows[0], rows[-1] + 1)):
            index = torch.tensor(rows, device=prompts.keys.device)
        self.keys[:, first_slot:end, :, :longest] = prompts.keys[:, index]
        self.values[:, first_slot:end, :, :longest] = prompts.values[:, index]

    @torch.inference_mode()
    def move(self, moves: list[Move]) -> None:
        """Copy whole slots; sources and destinations are disjoint."""
        for source, destination in moves:  # one by one: five times as fast on a CPU as by index
            self.keys[:, destination] = self.keys[:, source]
            self.values[:, destination] = self.values[:, source]

    def blocks(self, slot: int, length: int, size: int) -> Callable[[int], KeysValues]:
        """Gives a copy of each block of `size` tokens of a sequence of this length, by its number.
        All tokens from the first block asked for are copied at once, into memory that their blocks
        share."""
        copies: dict[int, KeysValues] = {}

        def block(index: int) -> KeysValues:
            if not copies:
                keys, values = (
                    memory[:, slot, :, index * size : length].clone()
                    for memory in (self.keys, self.values)
                )
                both = zip(keys.unsafe_split(size, -2), values.unsafe_split(size, -2), strict=True)
                copies.update(enumerate(both, index))

            return copies[index]

        return block

    @property
    def bytes_per_token(self) -> int:
        return sum(memory[:, :1, :, :1].nbytes for memory in (self.keys, self.values))

    @torch.inference_mode()
    def window(self, num_slots: int, extent: int, num_wanted: int) -> tuple[Tensor, Tensor]:
        """The first slots, of `extent` tokens or more."""
        self._fit(num_slots, extent, num_wanted)
        return self.keys[:, :num_slots], self.values[:, :num_slots]

    def _fit(self, num_slots: int, extent: int, num_wanted: int) -> None:
        """Make room for the first slots, and for `num_wanted` if more are needed. The extent grows
        by at least an eighth, so that copies stay rare, and shrinks if more than a quarter would be
        read in vain."""
        has_slots = self.keys.shape[1]
        has_extent = self.keys.shape[-2]

        rounded = -(-max(extent, self._least) // EXTENT_BLOCK) * EXTENT_BLOCK
        if extent > has_extent:
            rounded = max(rounded, -(-has_extent * 9 // (8 * EXTENT_BLOCK)) * EXTENT_BLOCK)
        elif 4 * rounded > 3 * has_extent:
            rounded = has_extent

        if num_slots > has_slots or rounded != has_extent:
            region = slice(min(has_slots, num_slots)), slice(None), slice(min(has_extent, rounded))
            shape = (max(num_slots, num_wanted), rounded)
            self.keys = _moved(self.keys, region, shape)
            self.values = _moved(self.values, region, shape)


def num_tokens(blocks: Sequence[KeysValues]) -> int:
    return sum(keys.shape[-2] for keys, _ in blocks)


def joined_blocks(blocks: Sequence[KeysValues]) -> KeysValues:
    """Keys and values of all tokens of the blocks."""
    keys, values = zip(*blocks, strict=True)
    return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)


def _moved(memory: Tensor, region: tuple[slice, slice, slice], shape: tuple[int, int]) -> Tensor:
    """A copy with another shape (slots and extent). region: the part to keep, of slots, kv heads
    and extent."""
    new = memory.new_zeros(memory.shape[0], shape[0], memory.shape[2], shape[1], memory.shape[4])
    new[:, *region] = memory[:, *region]
    return new
