"""The shares of domains: assigns each slot of a step to a domain, exactly over time."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Quotas:
    """The slots of the steps from the next one on, `consumer_batch` per step, numbered from that
    step's first slot.

    After every slot each domain has had its share of all slots, to within one slot. Slots are
    assigned by deadline (earliest first, then in the domains' order) among the domains that are not
    ahead of their share: the windows of proportionate fairness (Baruah et al. 1996), which are
    always met this way. A domain's lag behind its share is the only state needed to continue.

    A single domain has all slots.
    """

    def __init__(
        self,
        consumer_batch: int,
        next_step: int = 0,
        weights: Sequence[Fraction] = (Fraction(1),),
        lags: Sequence[Fraction] | None = None,
    ) -> None:
        """weights: relative, above 0. lags: the slots by which each domain is behind its share at
        the next step."""
        assert consumer_batch > 0 and all(weight > 0 for weight in weights)
        self.shares = [weight / sum(weights) for weight in weights]
        lags = lags or [Fraction(0)] * len(self.shares)
        self._whole = lcm(*(each.denominator for each in (*self.shares, *lags)))
        """Units of one slot."""
        self._gains = [int(share * self._whole) for share in self.shares]
        self._lag = [int(lag * self._whole) for lag in lags]
        """After the last computed step."""
        self._batch = consumer_batch
        self.next_step = next_step
        self._num_made = next_step
        self._lags = deque[list[int]]()
        """Before each computed step."""
        self._places: list[list[int]] = [[] for _ in self.shares]
        self._num_consumed = [0] * len(self.shares)

    @property
    def lags(self) -> list[Fraction]:
        """Lag of each domain at the next step."""
        lags = self._lags[0] if self._lags else self._lag
        return [Fraction(lag, self._whole) for lag in lags]

    def up_to(self, domain: int, step: int) -> int:
        """Slots of the domain from the next step to this one."""
        if step < self.next_step:
            return 0
        self._make(step)
        return bisect_left(self._places[domain], (step + 1) * self._batch)

    def in_all(self, domain: int, step: int) -> int:
        """Slots of the domain from this object's first step to this one."""
        return self._num_consumed[domain] + self.up_to(domain, step)

    def place(self, domain: int, number: int) -> int:
        """Position of the domain's slot of that number, counted from 0 at the next step."""
        while number >= len(self._places[domain]):
            self._make(self._num_made)
        return self._places[domain][number]

    def consume(self) -> None:
        """Note that the next step is consumed."""
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
        """Assign one more slot; returns its domain."""
        self._lag = [lag + gain for lag, gain in zip(self._lag, self._gains, strict=True)]
        chosen = max(range(len(self._lag)), key=self._lag.__getitem__)
        if self._lag[chosen] < self._whole:  # none is overdue, as after a change of the shares
            due = (domain for domain, lag in enumerate(self._lag) if lag > 0)
            chosen = min(due, key=self._deadline)

        self._lag[chosen] -= self._whole
        return chosen

    def _deadline(self, domain: int) -> int:
        """Slots until the domain is due."""
        return -((self._lag[domain] - self._whole) // self._gains[domain])
