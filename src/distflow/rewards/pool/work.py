"""The calls that are asked of a reward function at once, and their results."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from distflow.rewards.reward_results import RewardResult

Calls = Sequence[Mapping[str, object]]
"""The arguments of each call, by name."""


class Work:
    """Calls of one function, in parts. Several threads use it together, by atomic calls alone."""

    def __init__(
        self, name: str, parts: Sequence[Calls], timeout_s: float, give_up_after: int
    ) -> None:
        self.name = name
        self.parts = parts
        """The calls that one process gets together."""
        self.timeout_s = timeout_s
        """Of one call."""
        self.give_up_after = give_up_after
        """See `RewardPool.score_group`."""
        self.crashed = set[int]()
        """Numbers of parts whose process crashed."""
        self._waiting = deque(range(len(parts)))
        """Numbers of parts that no thread has taken."""
        self._results: dict[int, Sequence[RewardResult]] = {}
        """By number of the part."""

    def take(self) -> int | None:
        """The next part's number, unless other threads took them all."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def put_back(self, numbers: Sequence[int]) -> None:
        """Parts that were taken in this order are the next ones again."""
        self._waiting.extendleft(reversed(numbers))

    def abandon(self) -> None:
        """Leave what no thread has taken."""
        self._waiting.clear()

    def keep(self, number: int, results: Sequence[RewardResult]) -> None:
        """Keep a part's results, or one for all its calls."""
        part = self.parts[number]
        self._results[number] = results if len(results) == len(part) else [*results] * len(part)

    def results(self, missing: RewardResult) -> Iterable[RewardResult]:
        """The result of each call, in order. missing: of those that have none."""
        for number, part in enumerate(self.parts):
            yield from self._results.get(number) or [missing] * len(part)
