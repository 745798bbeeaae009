"""The history of a run's metrics up to a step, as rules look at it."""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from itertools import islice

from distflow.observe.crash_safe_files import JSON
from distflow.observe.findings.finding import MANY_STEPS, setting

RECENT = 100
"""Values that are kept."""
_FIRST = 20


class History:
    """The metrics of the last steps, and the first values of each."""

    def __init__(self, config: Mapping[str, JSON]) -> None:
        self.config = config
        """As in config.yaml."""
        self.step = -1
        self.metrics = dict[str, float]()
        """Of this step."""
        self.window: dict[int, Mapping[str, float]] = {}
        """Of the last 8 steps."""
        self.begin: dict[int, Mapping[str, float]] = {}
        """Of the first step."""
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

    def first(self, name: str) -> float:
        """The mean of its first 20 values, or fewer."""
        if name in self._first:
            return statistics.fmean(self._first[name])
        return math.nan

    def setting(self, key: str) -> JSON:
        """The value of a key of the config; None if unknown."""
        return setting(self.config, key)
