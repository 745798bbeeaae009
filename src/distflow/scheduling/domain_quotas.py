"""The shares of domains: assigns each slot of a step to a domain, exactly over time, with changes
by a curriculum."""

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

from distflow.scheduling.curriculum import Accuracy, Curriculum
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.scheduler_snapshot import SavedShares, Snapshot

Shares = Sequence[Fraction]
"""Share of each domain; they sum to 1."""


class Quotas:
    """The slots of the steps from the next one on, `consumer_batch` per step, numbered from that
    step's first slot.

    After every slot each domain has had its share of all slots, to within one slot. Slots are
    assigned by deadline (earliest first, then in the domains' order) among the domains that are not
    ahead of their share: the windows of proportionate fairness (Baruah et al. 1996), which are
    always met this way. A domain's lag behind its share is the only state needed to continue.

    If shares change between steps, a domain is due the sum of its shares over all slots. No rule
    that does not know future changes can keep every domain within one slot of that; if a domain
    lags by a slot or more, the domain that lags most gets the slot. So none is ever ahead by a
    slot, nor behind by more than
    1 + 1/2 + ... + 1/n slots with n domains (Adler et al. 2003, *A Proportionate Fair Scheduling
    Rule with Good Worst-case Performance*).

    A single domain has all slots.
    """

    def __init__(
        self,
        consumer_batch: int,
        next_step: int = 0,
        weights: Sequence[Fraction] = (Fraction(1),),
        lags: Sequence[Fraction] | None = None,
    ) -> None:
        """weights: relative, at least one above 0. lags: the slots by which each domain is behind
        its share at the next step."""
        assert consumer_batch > 0 and all(weight >= 0 for weight in weights)
        shares = [weight / sum(weights) for weight in weights]
        lags = lags or [Fraction(0)] * len(shares)
        self._whole = lcm(*(each.denominator for each in (*shares, *lags)))  # units of one slot
        self._shares = [int(share * self._whole) for share in shares]
        self._lag = [int(lag * self._whole) for lag in lags]  # lags after the last computed step
        self._batch = consumer_batch
        self.next_step = next_step
        self._num_made = next_step
        self._lags = deque[list[int]]()  # lags before each computed step
        # the first entry is in effect
        self._changes = deque[tuple[int, Shares]]([(next_step, shares)])
        self._places: list[list[int]] = [[] for _ in shares]
        self._num_consumed = [0] * len(shares)

    @property
    def lags(self) -> list[Fraction]:
        """Lag of each domain at the next step."""
        lags = self._lags[0] if self._lags else self._lag
        return [Fraction(lag, self._whole) for lag in lags]

    @property
    def changes(self) -> list[tuple[int, Shares]]:
        """(first step, shares) of the next step and of all later changes."""
        past = [shares for step, shares in self._changes if step <= self.next_step]
        return [
            (self.next_step, past[-1]),
            *(change for change in self._changes if change[0] > self.next_step),
        ]

    def change(self, step: int, shares: Shares) -> None:
        """Set the shares from a step on that is not formed yet; later changes are discarded."""
        assert step >= self.next_step and sum(shares) == 1 and min(shares) >= 0
        if step < self._num_made:  # steps were computed ahead to see which domain comes first
            self._lag = self._lags[step - self.next_step]
            self._num_made = step
            while len(self._lags) > step - self.next_step:
                self._lags.pop()
            for places in self._places:
                del places[bisect_left(places, step * self._batch) :]
        while self._changes[-1][0] >= step and len(self._changes) > 1:
            self._changes.pop()
        self._changes.append((step, shares))

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
        """Position of the domain's slot of that number, counted from 0 at the next step; after all
        others if it may never have that many."""
        last, shares = self._changes[-1]
        if shares[domain] == 0:
            num_places = self.up_to(domain, max(last, self.next_step))
            return self._places[domain][number] if number < num_places else sys.maxsize
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
        while len(self._changes) > 1 and self._changes[1][0] <= self.next_step:
            self._changes.popleft()

    def _make(self, step: int) -> None:
        while self._num_made <= step:
            self._set_shares(self._num_made)
            self._lags.append(list(self._lag))
            for place in range(self._num_made * self._batch, (self._num_made + 1) * self._batch):
                self._places[self._take()].append(place)
            self._num_made += 1

    def _set_shares(self, step: int) -> None:
        """Set the shares of a step in units of a slot; the unit shrinks if they are finer than
        before."""
        shares = [shares for first, shares in self._changes if first <= step][-1]
        finer = lcm(self._whole, *(share.denominator for share in shares)) // self._whole
        if finer > 1:
            self._whole *= finer
            self._lag = [lag * finer for lag in self._lag]
            self._lags = deque([lag * finer for lag in lags] for lags in self._lags)
        self._shares = [int(share * self._whole) for share in shares]

    def _take(self) -> int:
        """Assign one more slot; returns its domain."""
        self._lag = [lag + share for lag, share in zip(self._lag, self._shares, strict=True)]
        domains = range(len(self._lag))
        chosen = max(domains, key=self._lag.__getitem__)
        if self._lag[chosen] < self._whole:  # no domain is overdue
            chosen = min(
                (domain for domain in domains if self._lag[domain] > 0), key=self._deadline
            )
        self._lag[chosen] -= self._whole
        return chosen

    def _deadline(self, domain: int) -> tuple[float, int]:
        """Slots until the domain is due. A domain without a share never is, and is ordered by its
        lag."""
        if self._shares[domain] == 0:
            return math.inf, -self._lag[domain]
        return -((self._lag[domain] - self._whole) // self._shares[domain]), 0


class DomainShares:
    """quotas: which domain each slot belongs to. figures: share and accuracy of each domain at the
    last release; empty if shares stay. A run without domains has one source, with all slots."""

    def __init__(self, plan: DataPlan, start: Snapshot) -> None:
        self._plan = plan
        self.figures: Mapping[str, Mapping[str, float]] = {}
        changes = start.get("shares", []) if plan.curriculum else []
        before = start.get("domains", {})
        self.quotas = Quotas(
            plan.consumer_batch,
            start["step"],
            self._in_order(changes[0]) if changes else plan.shares,
            [Fraction(before[source.name]["lag"]) for source in plan.sources] if before else None,
        )
        for change in changes[1:]:
            self.quotas.change(change["step"] - 1, self._in_order(change))
        self._curriculum = None
        if plan.curriculum:
            weights = {domain.name: domain.weight for domain in plan.domains}
            self._curriculum = Curriculum(plan.curriculum, weights, start.get("curriculum"))

    def record(self, domain: str, accuracy: Accuracy) -> None:
        """Count the responses to a row of the domain."""
        if self._curriculum:
            self._curriculum.count(domain, accuracy)

    def change(self, step: int) -> SavedShares | None:
        """Called before the step is consumed: new shares for the first step for which no group can
        have been issued yet; None if not due. Raises UserError if the curriculum fails."""
        if not self._curriculum:
            return None
        changes = self.quotas.changes
        domains = zip(self._plan.domains, changes[0][1], strict=True)
        self.figures = figures = {domain.name: {"share": float(share)} for domain, share in domains}
        if self._plan.curriculum is None or (step + 1) % self._plan.curriculum.every:
            return None
        shares, known = self._curriculum.shares(step + 1, changes[-1][1])
        for name, progress in known.items():
            measured = {"accuracy": progress.accuracy, "learnability": progress.learnability}
            figures[name] |= {what: value for what, value in measured.items() if value is not None}
        self.quotas.change(step + 1 + self._plan.max_staleness, shares)
        return self.saved_shares()[-1]

    def saved_state(self) -> dict[str, Any]:
        """Entries of a snapshot; empty if shares stay."""
        if self._curriculum is None:
            return {}
        return {"shares": self.saved_shares(), "curriculum": self._curriculum.saved_curriculum()}

    def saved_shares(self) -> list[SavedShares]:
        """The shares of the next step, and those of each later step at which they change."""
        names = [source.name for source in self._plan.sources]
        return [
            {
                "step": step + 1,
                "shares": {name: str(share) for name, share in zip(names, shares, strict=True)},
            }
            for step, shares in self.quotas.changes
        ]

    def lags(self) -> dict[str, str]:
        """Lag of each domain, as in a snapshot."""
        return {
            domain.name: str(lag)
            for domain, lag in zip(self._plan.domains, self.quotas.lags, strict=True)
        }

    def shown(self) -> dict[str, dict[str, str]]:
        """Share and lag of each domain, as in a record."""
        shares = dict(zip(self.lags(), self.quotas.changes[0][1], strict=True))
        return {name: {"share": str(shares[name]), "lag": lag} for name, lag in self.lags().items()}

    def _in_order(self, saved: SavedShares) -> list[Fraction]:
        return [Fraction(saved["shares"][source.name]) for source in self._plan.sources]
