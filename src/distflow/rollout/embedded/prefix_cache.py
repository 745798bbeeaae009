"""Keys and values of finished requests, found again by the tokens that a prompt begins with.

They are in blocks of equally many tokens. A block is known by its tokens and by the block before it, as in vLLM's and
nano-vllm's prefix caching, which compare hashes; here the tokens themselves are compared. The first block of a prompt
follows a root, which names the weights: what other weights computed is never found.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_Name = tuple[Hashable, tuple[int, ...]]
"""Number of the block before, or the root; tokens."""


class PrefixCache(Generic[T]):
    """Blocks with their contents, the least recently used first; a block is used whenever one after it is."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[_Name, tuple[int, T]] = OrderedDict()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """In blocks."""
        return len(self._blocks)

    def find(self, root: tuple[Hashable, ...], tokens: tuple[int, ...]) -> list[T]:
        """The contents of the longest row of blocks with which `tokens` begin."""
        names = self._known(root, tokens)
        self._use(names)
        return [self._blocks[name][1] for name in names]

    def add(self, root: tuple[Hashable, ...], tokens: tuple[int, ...], content: Callable[[int], T]) -> None:
        """Keep all full blocks of `tokens`. content: of the block with this number in the row, where it is new."""
        names = self._known(root, tokens)
        before: Hashable = self._blocks[names[-1]][0] if names else root
        for index in range(len(names), len(tokens) // self.block_tokens):
            names.append((before, self._tokens_of(index, tokens)))
            before = number = next(self._numbers)
            self._blocks[names[-1]] = (number, content(index))
        self._use(names)

    def pop_oldest(self) -> T:
        """Forget the least recently used block; there must be one."""
        return self._blocks.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._blocks.clear()

    def _known(self, root: Hashable, tokens: tuple[int, ...]) -> list[_Name]:
        names: list[_Name] = []
        before: Hashable = root
        for index in range(len(tokens) // self.block_tokens):
            name = (before, self._tokens_of(index, tokens))
            if name not in self._blocks:
                break
            names.append(name)
            before = self._blocks[name][0]
        return names

    def _use(self, names: list[_Name]) -> None:
        for name in reversed(names):  # none is older than those after it, which nobody could find without it
            self._blocks.move_to_end(name)

    def _tokens_of(self, index: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tokens[index * self.block_tokens : (index + 1) * self.block_tokens]
