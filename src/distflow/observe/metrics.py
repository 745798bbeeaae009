"""The metrics of a run: the meaning and unit of each, and how its parts are combined, from the
table `metrics.toml`."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["mean", "sum", "max", "min", "last"]

TIMED_OUT = "no score within"
"""The prefix of a reward error that counts as a timeout."""


class Metric(NamedTuple):
    """One metric, or a family of metrics with "*" in the name. kind: how values of parts are
    combined."""

    name: str
    kind: Kind
    unit: str
    doc: str


def read_table(name: str) -> dict[str, Any]:
    """A TOML file of this folder."""
    import tomllib  # only when a table is read

    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@cache
def metric_table() -> tuple[Metric, ...]:
    return tuple(Metric(name, *entry) for name, entry in read_table("metrics.toml").items())


class Headline(NamedTuple):
    """A number in a step's line of text, an entry of `charts.toml`."""

    label: str
    names: tuple[str, ...]
    form: str
    width: int

    def text(self, value: float) -> str:
        """The value, in `width` characters if it has a usual size, and never longer than 9."""
        shown = format(value, self.form)
        return format(shown if len(shown) <= 9 else format(value, ".2e"), f">{self.width}")


@cache
def headline_table() -> tuple[Headline, ...]:
    """All numbers of a step's line of text, in their order."""
    return tuple(
        Headline(**{**row, "names": tuple(row["names"])})
        for row in read_table("charts.toml")["headlines"]
    )


def headline_names() -> set[str]:
    return set(chain.from_iterable(line.names for line in headline_table()))


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """The first entry of the table that matches a name."""
    for metric, fits in _patterns():
        if metric.name == name or (fits and fits(name)):
            return metric
    return None


@cache
def _patterns() -> list[tuple[Metric, Callable[[str], object] | None]]:
    """The entries, with what tells whether a name is of their family."""
    patterns = list[tuple[Metric, Callable[[str], object] | None]]()
    for metric in metric_table():
        fits = None
        if "*" in metric.name:
            parts = map(re.escape, metric.name.split("*"))
            fits = re.compile(".+".join(parts)).fullmatch
        patterns.append((metric, fits))

    return patterns


def headlines(values: Mapping[str, float]) -> dict[Headline, float]:
    """Those of the metrics that a line of text shows."""
    present = {}
    for line in headline_table():
        for name in line.names:
            if name in values:
                present[line] = values[name]
                break

    return present


Measured = tuple[Mapping[str, float], float]
"""Metrics by name, and their weight: what their means were averaged over (samples, tokens)."""


def combine(parts: Sequence[Measured]) -> dict[str, float]:
    """One set of metrics from those of parts.

    A metric that only some parts have is combined over those. A name that is not in the table is a
    mean.
    """
    gathered: dict[str, list[tuple[float, float]]] = {}
    for values, weight in parts:
        for name, value in values.items():
            gathered.setdefault(name, []).append((value, weight))
    return {name: _combine_one(name, pairs) for name, pairs in gathered.items()}


def _combine_one(name: str, pairs: list[tuple[float, float]]) -> float:
    values = [value for value, _ in pairs]
    if len(values) == 1:
        return values[0]

    metric = find_metric(name)
    kind = metric.kind if metric else "mean"
    if kind == "mean":
        total = sum(weight for _, weight in pairs)
        if total:
            return sum(value * weight for value, weight in pairs if weight) / total
        return 0.0

    if kind == "last":
        return values[-1]
    if kind == "sum":
        return sum(values)

    # Python's max() and min() lose or keep a NaN depending on its position; a NaN anywhere must
    # show.
    nan = next((value for value in values if value != value), None)
    if nan is not None:
        return nan
    if kind == "max":
        return max(values)

    return min(values)
