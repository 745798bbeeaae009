"""Paged key-value memory: a pool of fixed size, the owners of its pages, and attention of one token a row over it.

Attention gathers the row's pages and multiplies as `DecoderView`. torch has a kernel that reads pages where they lie
(`torch.nn.attention.varlen`, `block_table`), but only with an implementation of FlashAttention that must be installed
separately; FlexAttention needs a compiler.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from distflow.models.cached_decoder import DecoderView, PromptKV, attend

TRASH = 0
"""The page that rows without a sequence write to."""

PageCopy = tuple[int, int, int, Sequence[int]]
"""Row of a prefill, first and end of the positions to copy, pages of the sequence from its first token on."""


def pages_for(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens)


class PagePool:
    """Which pages are free. A shared page is free when its last sequence gave it back."""

    def __init__(self, num_pages: int) -> None:
        """num_pages: page numbers, `TRASH` among them."""
        self._free = list(range(num_pages - 1, TRASH, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """There must be as many."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


class PageMemory:
    """`keys`, `values`: `(layers, pages, kv_heads, page_tokens, head_dim)`, zero at first: attention masks what was
    never written, but a NaN in it would still spread."""

    def __init__(self, decoder: DecoderView, num_pages: int, page_tokens: int) -> None:
        shape = (decoder.num_layers, num_pages, decoder.num_kv_heads, page_tokens, decoder.head_dim)
        self.keys = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.zeros_like(self.keys)
        self.page_tokens = page_tokens

    def fill(self, prompts: PromptKV, parts: Iterable[PageCopy]) -> None:
        """Copy tokens of prefilled prompts to pages."""
        rows, positions, pages = [], [], []
        for row, first, end, own in parts:
            position = np.arange(first, end)
            rows.append(np.full(len(position), row))
            positions.append(position)
            pages.append(np.asarray(own, dtype=np.int64)[position // self.page_tokens])
        stacked = torch.from_numpy(np.stack([np.concatenate(each) for each in (rows, positions, pages)]))
        row, position, page = upload(stacked, self.keys.device)
        offset = position % self.page_tokens
        self.keys[:, page, :, offset] = prompts.keys[:, row, :, position]
        self.values[:, page, :, offset] = prompts.values[:, row, :, position]


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, after the work launched before, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class PagedAttention:
    """The attention of one decode step. All layers write and gather at the same places."""

    def __init__(self, memory: PageMemory, tables: Tensor, positions: Tensor, bias: Tensor) -> None:
        """tables: `(rows, width)`, pages of each row in order; positions: `(rows,)`, of the rows' tokens; bias: see
        `attend`, of `width` pages."""
        self._memory = memory
        self._bias = bias
        num_kv_heads = memory.keys.shape[2]
        self._page = tables.gather(1, (positions // memory.page_tokens)[:, None]).squeeze(1)
        self._offset = positions % memory.page_tokens
        heads = torch.arange(num_kv_heads, device=tables.device)
        self._gathered = (tables[:, None] * num_kv_heads + heads[:, None]).flatten()  # (rows, kv heads, width)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Keep the tokens' keys and values, `(rows, kv_heads, head_dim)`, and attend to all up to them."""
        keys, values = (
            self._write_and_gather(self._memory.keys[layer], key),
            self._write_and_gather(self._memory.values[layer], value),
        )
        return attend(query, keys, values, self._bias, scaling)

    def _write_and_gather(self, memory: Tensor, new: Tensor) -> Tensor:
        """Write what is new; all of each row, `(rows, kv_heads, width * page_tokens, head_dim)`."""
        memory[self._page, :, self._offset] = new
        pages = memory.flatten(0, 1).index_select(0, self._gathered)
        return pages.view(len(new), memory.shape[1], -1, memory.shape[-1])
