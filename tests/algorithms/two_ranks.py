"""Two ranks in one process: threads that add and compare their tensors."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """A `Collective` of as many threads as there are ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self.thread = threading.local()

    @property
    def rank(self) -> int:
        number: int = self.thread.number
        return number

    def sum(self, value: Any) -> Any:
        found = self.gather(value)
        if isinstance(value, Tensor):
            return torch.stack(found).sum(dim=0)
        return sum(found)

    def max(self, value: Any) -> Any:
        found = self.gather(value)
        if isinstance(value, Tensor):
            return torch.stack(found).amax(dim=0)
        return max(found)

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = copy.deepcopy(value)
        self.barrier.wait(timeout=60)
        found = [*self.values]
        # nobody writes before all have read
        self.barrier.wait(timeout=60)
        return found


def run_on_ranks(calls: Sequence[Callable[[Ranks], T]]) -> list[T]:
    """The result of each rank's call. The first error ends all."""
    ranks = Ranks(len(calls))
    results: list[T | None] = [None] * len(calls)
    errors = list[BaseException]()

    def run(number: int) -> None:
        ranks.thread.number = number
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
