"""What the engine drew lately, to be found again in the data that clients train on."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_TOKENS = 16 * 2**20
_MOST_EQUAL = 64
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Draw:
    """One sample."""

    model_id: str | None
    """None for the base."""
    version: int
    """The steps that its model had done."""
    temperature: float
    started: float
    """Seconds since the epoch, like `ended`."""
    ended: float
    token_ids: NDArray[np.int64]
    """`(n,)`: prompt and response."""
    prompt_length: int
    log_probs: NDArray[np.float32]
    """`(n - prompt_length,)`."""
    stopped: bool
    """By a stop token or string, not by its length."""

    @property
    def draws(self) -> "tuple[Draw, ...]":
        return (self,)


class Draws:
    """The latest, within a limit of memory. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_hash: dict[int, deque[Draw]] = {}
        self._num_tokens = 0

    def add(self, draws: Sequence[Draw]) -> None:
        with self._lock:
            for draw in draws:
                key = int(_hashes(draw.token_ids)[-1])
                equal = self._by_hash.setdefault(key, deque(maxlen=_MOST_EQUAL))
                if len(equal) < _MOST_EQUAL:
                    self._num_tokens += len(draw.token_ids)
                equal.append(draw)

            while self._num_tokens > _MOST_TOKENS:
                oldest = self._by_hash.pop(next(iter(self._by_hash)))
                self._num_tokens -= sum(len(each.token_ids) for each in oldest)

    def within(self, token_ids: NDArray[np.int64]) -> list[list[Draw]]:
        """Those with which the sequence begins: equal ones together, the shortest first."""
        found = []
        with self._lock:
            for end, value in enumerate(_hashes(token_ids).tolist(), 1):
                begin = token_ids[:end]
                equal = []
                for draw in self._by_hash.get(value, ()):
                    if np.array_equal(draw.token_ids, begin):
                        equal.append(draw)
                if equal:
                    found.append(equal)
        return found


def _hashes(token_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Of each beginning of the sequence: the sum of its tokens times powers, modulo 2**64."""
    powers = np.cumprod(np.full(len(token_ids), _BASE))
    return np.cumsum((token_ids.astype(np.uint64) + np.uint64(1)) * powers)
