"""Decides which steps are audited, within a budget and ahead of time, so that weights of older
versions are kept."""

import hashlib
import math
import random
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import IntEnum

from distflow.audit.audited_step.updates import plan_of
from distflow.audit.recorded_step import RecordedStep

SHARE = 0.01
"""The share of the run's time that all checks here may take. If the first audits and
looks, which ignore their cost, took more, later ones have a quarter of their shares until this is
made up for, and the checks of most steps, which find rare faults, half."""

SHORT_S = 60.0
"""Shorter runs may take as much time for checks as one of this length: in a run of seconds they
cost nobody anything, and a fault that begins late would be found in none of its few steps."""

NUM_FIRST = 3
"""The first audits of a process, which the time budget ignores."""

NUM_FIRST_LOOKS = 9
"""First steps of a process with a look, whatever it costs; later those after 2^n and 3 * 2^n steps,
and the last."""


class Depth(IntEnum):
    """How much of a step is checked: only counts; each update's gradient and the metrics; also a
    part of one group and one update; also parts of two groups, and the models on one sample;
    everything."""

    NONE = 0
    BASE = 1
    QUICK = 2
    LOOK = 3
    AUDIT = 4


SHARES = {Depth.AUDIT: 0.0025, Depth.LOOK: 0.002, Depth.QUICK: 0.0015, Depth.BASE: 0.004}
"""The shares of audits, of looks at other steps, of quick looks at the remaining steps, and of the
checks of most others. The rest is for what every step has."""


class AuditSchedule:
    """Audits the first step of a process, the second (weights have moved once), the first that may
    hold tokens of every staleness, and one in every `frequency` steps, at a random position, so
    that a fault in every third step is found.

    After the first few, an audit waits until audits have taken less than their share of the run's
    time, unless every step is audited. If weights may be stale, it then waits until weights of all
    ages were kept for it. Every other step gets a look, while looks have taken less than their
    share, else a quick look, which has another share.
    """

    def __init__(
        self,
        frequency: int,
        first_step: int,
        max_staleness: int = 0,
        others: Collection[int] = (),
        last_step: int | None = None,
    ) -> None:
        """frequency: in steps; 0 never audits. first_step: of this process. others: further steps
        to audit. last_step: of the run."""
        self.frequency = frequency
        self._max_staleness = max_staleness
        self._always = {first_step, first_step + 1, first_step + max_staleness + 1, *others}
        self._waiting = False
        self._planned = -1
        self._num_made = 0
        self._first_step = first_step
        self._last_step = last_step
        self._began = time.monotonic()
        self._spent_s_of = dict.fromkeys(SHARES, 0.0)
        self._spent_s = 0.0  # in total, with the first ones, which no share counts

    def is_due(self, step: int) -> bool:
        """Whether to audit the step; call once per step, in order."""
        if self.frequency <= 0:
            return False
        if self._is_named(step) or step == self._planned:
            return True
        if not self._is_place(step) and not self._waiting:
            return False
        can_be_made = self._affords(Depth.AUDIT) or self._num_made < NUM_FIRST
        if can_be_made and (self._is_place(step) or not self._max_staleness):
            return True
        if can_be_made and self._planned < step:
            self._planned = step + self._max_staleness + 1
        self._waiting = True
        return False

    def expects(self, step: int) -> bool:
        """Whether a later step that may be audited may train on tokens from the weights of
        `step`."""
        ahead = range(step + 1, step + self._max_staleness + 1)
        return self.frequency > 0 and any(
            self._is_named(s) or self._is_place(s) or s == self._planned for s in ahead
        )

    def looks_at(self, step: int) -> Depth:
        """How deeply to check the step if it is not audited."""
        if self.frequency <= 0:
            return Depth.NONE
        since = step - self._first_step
        is_named = (
            step == self._last_step
            or since < NUM_FIRST_LOOKS
            or since // (since & -since) in (1, 3)
        )
        if is_named or self._affords(Depth.LOOK):
            return Depth.LOOK
        return next(
            (depth for depth in (Depth.QUICK, Depth.BASE) if self._affords(depth)), Depth.NONE
        )

    def begins(self) -> None:
        """Call when an audit starts."""
        self._waiting = False
        self._planned = -1
        self._num_made += 1

    def budget_s(self, step: int) -> float:
        """An audit's share of the time between two audits."""
        step_s = (time.monotonic() - self._began) / (step - self._first_step + 1)
        return max(SHARES[Depth.AUDIT] * self.frequency * step_s, 0.05)

    def score_again_s(self) -> float:
        """Time for a look to call reward functions again: none if looks have used up their
        share."""
        return 0.05 if self._affords(Depth.LOOK) else 0.0

    @contextmanager
    def timed(self, step: int, depth: Depth) -> Iterator[None]:
        """Counts the time inside as that of the step's audit or look."""
        began = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - began
            self._spent_s += spent_s
            is_audit = depth is Depth.AUDIT
            is_first = (
                self._num_made <= NUM_FIRST
                if is_audit
                else step < self._first_step + NUM_FIRST_LOOKS
            )
            if not is_first and depth is not Depth.NONE:
                self._spent_s_of[depth] += spent_s

    def _affords(self, depth: Depth) -> bool:
        run_s = max(time.monotonic() - self._began, SHORT_S)
        is_behind = self._spent_s > SHARE * run_s
        less = (0.5 if depth is Depth.BASE else 0.25) if is_behind else 1.0
        return self._spent_s_of[depth] <= SHARES[depth] * run_s * less

    def _is_named(self, step: int) -> bool:
        return step in self._always or self.frequency == 1

    def _is_place(self, step: int) -> bool:
        """Whether the step is the one to audit in its window."""
        window = step // self.frequency
        place = int.from_bytes(
            hashlib.blake2b(f"audit {window}".encode(), digest_size=4).digest(), "little"
        )
        return step % self.frequency == place % self.frequency


def drawn_update(recorded: RecordedStep, role: str) -> int:
    """Which of the step's optimizer steps of this model a look watches, counted from 0; the same on
    all ranks."""
    passes, num_prompts = plan_of(recorded.config, role)
    wanted = passes * math.ceil(len(recorded.group_ids) / num_prompts)
    return random.Random(f"{role} {recorded.step}").randrange(max(wanted, 1))
