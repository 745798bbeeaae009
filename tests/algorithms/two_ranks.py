"""Two ranks in one process: threads that add and compare their tensors."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """A `Reduce` of as many threads as there are ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Tensor | None] = [None] * size
        self.rank = threading.local()

    def sum(self, value: Tensor) -> Tensor:
        return torch.stack(self._gather(value)).sum(dim=0)

    def max(self, value: Tensor) -> Tensor:
        return torch.stack(self._gather(value)).amax(dim=0)

    def _gather(self, value: Tensor) -> list[Tensor]:
        self.values[self.rank.number] = value.detach().clone()
        self.barrier.wait(timeout=60)
        found = [each for each in self.values if each is not None]
        # nobody writes before all have read
        self.barrier.wait(timeout=60)
        return found


def run_on_ranks(calls: Sequence[Callable[[Ranks], T]]) -> list[T]:
    """The result of each rank's call. The first error ends all."""
    ranks = Ranks(len(calls))
    results: list[T | None] = [None] * len(calls)
    errors = list[BaseException]()

    def run(number: int) -> None:
        ranks.rank.number = number
        try:
            results[number] = calls[number](ranks)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]
