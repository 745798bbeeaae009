"""Paged key-value memory on a device, and its free pages."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch

from distflow.device_transfer import send
from distflow.models.cached_decoder import DecoderView, PromptKV

TRASH = 0
"""The page that rows without a sequence write to."""

PageCopy = tuple[int, int, int, Rows[int]]
"""Row of a prefill, first and end of the positions to copy, and the sequence's pages from its first
token on."""


def pages_for(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens)


class PagePool:
    """Tracks free pages. A shared page is free when its last sequence returned it. A kept page
    holds its content until it is needed for something else, and counts as free when no sequence
    uses it."""

    def __init__(self, num_pages: int, oldest_kept: Callable[[], int]) -> None:
        """num_pages: including `TRASH`. oldest_kept: forgets a kept page and returns it."""
        self._free = list(range(num_pages - 1, TRASH, -1))
        self._holders = [0] * num_pages
        self._kept: set[int] = set()
        self._oldest_kept = oldest_kept
        self.num_free = len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` pages; that many must be free."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} are free"
        while len(self._free) < count:
            self._forget(self._oldest_kept())
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.num_free -= not self._holders[page]
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            self.num_free += not self._holders[page]
            if not self._holders[page] and page not in self._kept:
                self._free.append(page)

    def keep(self, page: int) -> int:
        """Keep the content of a page that a sequence uses."""
        self._kept.add(page)
        return page

    def forget_kept(self) -> None:
        for page in sorted(self._kept):
            self._forget(page)

    def _forget(self, page: int) -> None:
        self._kept.discard(page)
        if not self._holders[page]:
            self._free.append(page)


class PageMemory:
    """`keys`, `values`: `(layers, pages, kv_heads, page_tokens, head_dim)`, initially zero:
    attention masks unwritten memory, but a NaN in it would still spread."""

    def __init__(self, decoder: DecoderView, num_pages: int, page_tokens: int) -> None:
        shape = (decoder.num_layers, num_pages, decoder.num_kv_heads, page_tokens, decoder.head_dim)
        self.keys = torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
        self.values = torch.zeros_like(self.keys)
        self.page_tokens = page_tokens

    def fill(self, prompts: PromptKV, parts: Iterable[PageCopy]) -> None:
        """Copy tokens of prefilled prompts to pages."""
        rows = []
        positions = []
        pages = []
        for row, first, end, own in parts:
            position = np.arange(first, end)
            rows.append(np.full(len(position), row))
            positions.append(position)
            pages.append(np.asarray(own, dtype=np.int64)[position // self.page_tokens])

        stacked = torch.from_numpy(
            np.stack([np.concatenate(each) for each in (rows, positions, pages)])
        )
        row, position, page = send(stacked, self.keys.device)
        offset = position % self.page_tokens
        self.keys[:, page, :, offset] = prompts.keys[:, row, :, position]
        self.values[:, page, :, offset] = prompts.values[:, row, :, position]
