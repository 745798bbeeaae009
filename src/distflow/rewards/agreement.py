"""How far a reward agrees with people who have said of responses whether they are right."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from distflow.rewards.correctness import RIGHT, own_verdict
from distflow.rewards.pool import VerifierPool
from distflow.rewards.trial import Row, arguments_of
from distflow.rewards.verdict import Score, Verdict


class Agreement(NamedTuple):
    """counts: of (said by people, said by the reward). failed: why there was no verdict, of those without."""

    counts: Counter[tuple[bool, bool]]
    failed: list[str]

    @property
    def share(self) -> float:
        """Of the responses with a verdict, those on which both say the same."""
        return (self.counts[True, True] + self.counts[False, False]) / max(self.counts.total(), 1)

    @property
    def kappa(self) -> float:
        """Cohen's: 1 for full agreement, 0 for as much as chance would give (also where both always say the same)."""
        total = max(self.counts.total(), 1)
        people, reward = (sum(count for said, count in self.counts.items() if said[side]) / total for side in (0, 1))
        by_chance = people * reward + (1 - people) * (1 - reward)
        return (self.share - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0


async def measure(
    pool: VerifierPool, name: str, rows: Sequence[Row], labels: Sequence[bool], right_from: float = RIGHT
) -> Agreement:
    """Ask the pool's function `name` for a verdict on each row's own response. labels: whether it is right, which the
    reward says by a verdict of `right_from` or more."""

    async def ask(row: Row) -> Verdict:
        assert row.response is not None
        return await pool.judge(name, arguments_of(row, row.response))

    verdicts = await asyncio.gather(*map(ask, rows))
    judged = [(label, verdict) for label, verdict in zip(labels, verdicts, strict=True) if isinstance(verdict, Score)]
    counts = Counter((label, own_verdict(verdict) >= right_from) for label, verdict in judged)
    return Agreement(counts, [str(verdict) for verdict in verdicts if not isinstance(verdict, Score)])
