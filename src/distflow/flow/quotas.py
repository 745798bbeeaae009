"""Quotas: which domain each place of each step belongs to. A pure function of the weights, exact over time."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Quotas:
    """The places of the steps from the next one on, `consumer_batch` a step, numbered from its first place.

    After every place each domain has had its share of all of them, to within less than one place. Places go by deadline
    (earliest first, then by the domains' order) among the domains that are not ahead of their share: the windows of
    proportionate fairness (Baruah et al. 1996), which so are always met. What a domain is behind, its lag, is all that
    has to be known to go on.

    One domain has all places.
    """

    def __init__(
        self,
        consumer_batch: int,
        next_step: int = 0,
        weights: Sequence[Fraction] = (Fraction(1),),
        lags: Sequence[Fraction] | None = None,
    ) -> None:
        """weights: relative, above 0. lags: in places, by which each domain is behind its share at the next step."""
        assert consumer_batch > 0 and all(weight > 0 for weight in weights)
        shares = [weight / sum(weights) for weight in weights]
        lags = lags or [Fraction(0)] * len(shares)
        self._whole = lcm(*(each.denominator for each in (*shares, *lags)))  # counts as one place
        self._shares = [int(share * self._whole) for share in shares]
        self._lag = [int(lag * self._whole) for lag in lags]  # behind the last step that was made
        self._batch, self.next_step, self._num_made = consumer_batch, next_step, next_step
        self._lags = deque[list[int]]()  # before each step that was made
        self._places: list[list[int]] = [[] for _ in shares]
        self._num_consumed = [0] * len(shares)

    @property
    def lags(self) -> list[Fraction]:
        """At the next step."""
        self._make(self.next_step)
        return [Fraction(lag, self._whole) for lag in self._lags[0]]

    def up_to(self, domain: int, step: int) -> int:
        """Places of the domain in the steps from the next one to this one."""
        if step < self.next_step:
            return 0
        self._make(step)
        return bisect_left(self._places[domain], (step + 1) * self._batch)

    def in_all(self, domain: int, step: int) -> int:
        """The same from the first step on that this object knew."""
        return self._num_consumed[domain] + self.up_to(domain, step)

    def place(self, domain: int, number: int) -> int:
        """Where the domain's place of that number is, from 0 at the next step on; it must lie in a step asked for."""
        return self._places[domain][number]

    def consume(self) -> None:
        """The next step is consumed."""
        self._make(self.next_step)
        for domain, places in enumerate(self._places):
            number = self.up_to(domain, self.next_step)
            self._num_consumed[domain] += number
            del places[:number]
        self._lags.popleft()
        self.next_step += 1

    def _make(self, step: int) -> None:
        while self._num_made <= step:
            self._lags.append(list(self._lag))
            for place in range(self._num_made * self._batch, (self._num_made + 1) * self._batch):
                self._places[self._take()].append(place)
            self._num_made += 1

    def _take(self) -> int:
        """The domain of one more place."""
        self._lag = [lag + share for lag, share in zip(self._lag, self._shares, strict=True)]
        behind = (domain for domain, lag in enumerate(self._lag) if lag > 0)
        chosen = min(behind, key=lambda domain: -((self._lag[domain] - self._whole) // self._shares[domain]))
        self._lag[chosen] -= self._whole
        return chosen
