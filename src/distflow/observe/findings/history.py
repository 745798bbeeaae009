"""The history of a run's metrics up to a step, as rules look at it."""

import math
import re
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import islice

from distflow.observe.crash_safe_files import JSON
from distflow.observe.findings.finding import MANY_STEPS, setting

RECENT = 100
"""Values that are kept."""
NEW = 20
"""Values of a drift, which are compared with those before."""
_FIRST = 20
_MOST_CORRELATED = 0.9


class History:
    """The metrics of the last steps, and the first values of each. config: as in config.yaml.
    metrics: of this step. window: of the last 8 steps."""

    def __init__(self, config: Mapping[str, JSON]) -> None:
        self.config = config
        self.step = -1
        self.metrics = dict[str, float]()
        self.window: dict[int, Mapping[str, float]] = {}
        self.begin: dict[int, Mapping[str, float]] = {}
        """The first step."""
        self._recent: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=RECENT))
        self._first: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        before = self.metrics if step == self.step else {}
        self.step = step
        self.metrics = {**before, **finite}
        self.begin = self.begin or {step: self.metrics}
        self.window = {**self.window, step: self.metrics}
        if len(self.window) > MANY_STEPS:
            del self.window[min(self.window)]
        for name, value in finite.items():
            self._recent[name].append(value)
            if len(self._recent[name]) <= _FIRST:
                self._first[name].append(value)

    def now(self, name: str, default: float = math.nan) -> float:
        """The metric at this step."""
        return self.metrics.get(name, default)

    def last(self, name: str, number: int = RECENT) -> list[float]:
        """Its last values, at most 100, this step's included."""
        values = self._recent.get(name, ())
        return list(islice(values, max(len(values) - number, 0), None))

    def named(self, pattern: str) -> list[str]:
        """The metrics of this step that fit a pattern with "*"."""
        return _fitting(tuple(self.metrics), ".+".join(map(re.escape, pattern.split("*"))))

    def first(self, name: str) -> float:
        """The mean of its first 20 values, or fewer."""
        return statistics.fmean(self._first[name]) if name in self._first else math.nan

    def drift(self, name: str) -> float:
        """By how many standard errors the mean of the last 20 values is above that of the 80
        before; 0 without 100."""
        values = self.last(name)
        if len(values) < RECENT:
            return 0.0
        before = values[:-NEW]
        after = values[-NEW:]
        mean = statistics.fmean(before)
        rest = [value - mean for value in before]
        variance = sum(value * value for value in rest) / len(rest)
        moved = statistics.fmean(after) - mean
        if variance <= (1e-9 * abs(mean)) ** 2:
            return math.copysign(math.inf, moved) if abs(moved) > 1e-6 * abs(mean) else 0.0
        r = sum(a * b for a, b in zip(rest, rest[1:], strict=False)) / (variance * len(rest))
        # a short series underestimates it
        r = min(max(r + (1 + 4 * r) / len(rest), 0.0), _MOST_CORRELATED)
        return moved / math.sqrt(variance * (1 + r) / (1 - r) * (1 / len(after) + 1 / len(before)))

    def setting(self, key: str) -> JSON:
        """The value of a key of the config; None if unknown."""
        return setting(self.config, key)


@lru_cache(maxsize=256)
def _fitting(names: tuple[str, ...], pattern: str) -> list[str]:
    """Those that fit a regular expression. Most steps have the same names."""
    return list(filter(re.compile(pattern).fullmatch, names))
