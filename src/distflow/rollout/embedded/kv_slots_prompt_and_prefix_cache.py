"""Key-value memory: slots of running sequences, a bounded cache of prefilled prompts, and a prefix
cache."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from distflow.models.cached_decoder import PromptKV
from distflow.rollout.embedded.scheduler import Move

T = TypeVar("T")

_Name = tuple[Hashable, tuple[int, ...]]
"""The previous block's number, or the root; tokens."""


class PrefixCache(Generic[T]):
    """Keys and values of finished requests, found again by the tokens that a prompt begins with.

    Blocks have equally many tokens; only the last one of a row may have fewer, if partial blocks
    are kept. A block is identified by its tokens and the block before it, as in vLLM's and
    nano-vllm's prefix caching, which compare hashes; here the tokens themselves are compared. The
    first block of a prompt follows a root, which names the weights, so keys and values from other
    weights are never found. The least recently used blocks come first; using a block also uses
    those before it.
    """

    def __init__(self, block_tokens: int, keeps_ends: bool = False) -> None:
        self.block_tokens = block_tokens
        self._keeps_ends = keeps_ends
        self._blocks: OrderedDict[_Name, tuple[int, T]] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def find(self, root: tuple[Hashable, ...], tokens: tuple[int, ...]) -> list[T]:
        """The contents of the longest row of cached blocks at the start of `tokens`."""
        names = self._known(root, tokens)
        before, rest = self._next(root, names, tokens)
        for count in range(len(rest) if self._keeps_ends else 0, 0, -1):
            if (before, rest[:count]) in self._blocks:
                names.append((before, rest[:count]))
                break
        self._use(names)
        return [self._blocks[name][1] for name in names]

    def add(
        self, root: tuple[Hashable, ...], tokens: tuple[int, ...], content: Callable[[int], T]
    ) -> None:
        """Keep the blocks of `tokens`. content: makes the content of a new block from its number in
        the row."""
        names = self._known(root, tokens)
        while (rest := self._next(root, names, tokens))[1]:
            if len(rest[1]) < self.block_tokens and not self._keeps_ends:
                break
            if rest not in self._blocks:
                self._blocks[rest] = (next(self._numbers), content(len(names)))
            names.append(rest)
        self._use(names)

    def pop_oldest(self) -> T:
        """Forget the least recently used block; there must be one."""
        return self._blocks.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._blocks.clear()

    def _known(self, root: Hashable, tokens: tuple[int, ...]) -> list[_Name]:
        """The known blocks at the start of `tokens`, without a partial one."""
        names: list[_Name] = []
        while (name := self._next(root, names, tokens)) in self._blocks and len(
            name[1]
        ) == self.block_tokens:
            names.append(name)
        return names

    def _next(self, root: Hashable, names: list[_Name], tokens: tuple[int, ...]) -> _Name:
        """The name of the block after these."""
        start = len(names) * self.block_tokens
        return self._blocks[names[-1]][0] if names else root, tokens[
            start : start + self.block_tokens
        ]

    def _use(self, names: list[_Name]) -> None:
        # no block is older than those after it, which cannot be found without it
        for name in reversed(names):
            self._blocks.move_to_end(name)


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


class PromptCache:
    """Prefilled prompts by (weight version, tokens); when it is full, the oldest forwards are
    dropped.

    The unit is a whole forward, because its prompts share storage: dropping a single one would free
    nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._rows: dict[tuple[object, tuple[int, ...]], tuple[PromptKV, int]] = {}
        self._forwards: OrderedDict[int, tuple[int, list[tuple[object, tuple[int, ...]]]]] = (
            OrderedDict()
        )
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()
        self._forwards.clear()
        self._num_tokens = 0

    def rows(
        self,
        version: object,
        contexts: list[tuple[int, ...]],
        prefill: Callable[[list[tuple[int, ...]]], PromptKV],
    ) -> list[tuple[PromptKV, int]]:
        """The place of each context; missing ones are prefilled together and kept."""
        found = {context: self._rows.get((version, context)) for context in contexts}
        if missing := [context for context in contexts if found[context] is None]:
            forward = prefill(missing)
            found |= {context: (forward, row) for row, context in enumerate(missing)}
            self._keep(version, missing, forward)
        return [place for context in contexts if (place := found[context])]

    def _keep(self, version: object, contexts: list[tuple[int, ...]], forward: PromptKV) -> None:
        num_tokens = len(contexts) * forward.keys.shape[-2]
        if num_tokens > self.max_tokens:
            return
        names: list[tuple[object, tuple[int, ...]]] = [(version, context) for context in contexts]
        self._rows.update({name: (forward, row) for row, name in enumerate(names)})
        self._forwards[id(forward)] = (num_tokens, names)
        self._num_tokens += num_tokens
        while self._num_tokens > self.max_tokens:
            _, (freed_tokens, old_names) = self._forwards.popitem(last=False)
            self._num_tokens -= freed_tokens
            for name in old_names:
                del self._rows[name]


def _moved(memory: Tensor, region: tuple[slice, slice, slice], shape: tuple[int, int]) -> Tensor:
    """A copy with another shape (slots and extent). region: the part to keep, of slots, kv heads
    and extent."""
    new = memory.new_zeros(memory.shape[0], shape[0], memory.shape[2], shape[1], memory.shape[4])
    new[:, *region] = memory[:, *region]
    return new
