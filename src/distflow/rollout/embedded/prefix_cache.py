"""Keys and values of finished requests, found by the tokens that a prompt begins with."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_Name = tuple[Hashable, tuple[int, ...]]
"""The previous block's number, or the root; tokens."""


class PrefixCache(Generic[T]):
    """Keys and values of finished requests, found again by the tokens that a prompt begins with.

    Blocks have equally many tokens; the rest at the end of a row is not kept. A block is
    identified by its tokens and the block before it, as in vLLM's and nano-vllm's prefix caching,
    which compare hashes; here the tokens themselves are compared. The first block of a prompt
    follows a root, which names the weights, so keys and values from other weights are never found.
    The least recently used blocks come first; using a block also uses those before it.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[_Name, tuple[int, T]] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def find(self, root: tuple[Hashable, ...], tokens: tuple[int, ...]) -> list[T]:
        """The contents of the longest row of cached blocks at the start of `tokens`."""
        names = self._known(root, tokens)
        self._use(names)
        return [self._blocks[name][1] for name in names]

    def add(
        self, root: tuple[Hashable, ...], tokens: tuple[int, ...], content: Callable[[int], T]
    ) -> None:
        """Keep the blocks of `tokens`. content: makes the content of a new block from its number in
        the row."""
        names = self._known(root, tokens)
        for _ in range(len(names), len(tokens) // self.block_tokens):
            name = self._next(root, names, tokens)
            self._blocks[name] = (next(self._numbers), content(len(names)))
            names.append(name)
        self._use(names)

    def pop_oldest(self) -> T:
        """Forget the least recently used block; there must be one."""
        return self._blocks.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._blocks.clear()

    def _known(self, root: Hashable, tokens: tuple[int, ...]) -> list[_Name]:
        """The known blocks at the start of `tokens`."""
        names: list[_Name] = []
        while (name := self._next(root, names, tokens)) in self._blocks:
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
