"""The charts of the report: each asks one question, and shows the metrics that answer it."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, cast

from distflow.observe.metrics import find_metric, read_table
from distflow.observe.run_reader import MetricsRecord

Column: TypeAlias = Sequence[float | str | None]

MAX_POINTS = 1500
MAX_SERIES = 300
MAX_VALUES = 150_000
Z_95 = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""
_MAX_LINES = 8


class ChosenChart(TypedDict):
    """A chart in the page's form, with the metrics that it shows."""

    question: str
    kind: Literal["line", "stack"]
    unit: str
    names: list[str]
    labels: NotRequired[dict[str, str]]
    """By metric, of names that are not clear enough."""
    colors: NotRequired[dict[str, int]]
    """By metric, if a line has the same color in several charts."""


def choose_charts(columns: Mapping[str, Column]) -> tuple[list[ChosenChart], list[str]]:
    """The charts that have data, and the names that no chart shows.

    A metric is in the first chart that accepts it; a chart has at most 8 lines (a stack has all). A
    chart of which no line changes is left out.
    """
    remaining = sorted(columns)
    charts: list[ChosenChart] = []
    for chart in read_table("charts.toml")["charts"]:
        matching: list[str] = []
        for pattern in chart["patterns"]:
            fits = re.compile(pattern).fullmatch
            matching += [name for name in remaining if fits(name) and name not in matching]

        if chart["kind"] == "line":
            matching = matching[:_MAX_LINES]

        if any(len({*columns[name]} - {None}) > 1 for name in matching):
            shown = {key: chart[key] for key in ("question", "kind", "unit")}
            charts.append(cast(ChosenChart, {**shown, "names": matching}))
            remaining = [name for name in remaining if name not in matching]

    return charts, remaining


def unit_of(name: str) -> str:
    """The unit in which the report shows the metric."""
    metric = find_metric(name)
    if metric is None:
        return ""
    return "GiB" if metric.unit == "bytes" else metric.unit


def tabulate(records: Sequence[MetricsRecord]) -> dict[int, dict[str, float]]:
    """All metrics by step, bytes as GiB; records of several kinds (train, val) are merged, later
    ones win."""
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        steps.setdefault(record.step, {}).update(record.values)
    names = set[str]().union(*steps.values())
    in_bytes = [name for name in names if unit_of(name) == "GiB"]

    for values in steps.values():
        for name in in_bytes:
            if name in values:
                values[name] /= 2**30

    return steps


def series(
    steps: Mapping[int, Mapping[str, float]],
    max_points: int = MAX_POINTS,
    max_values: int = MAX_VALUES,
) -> dict[str, Any]:
    """Columns for the charts, of at most `MAX_SERIES` metrics: `x`, the steps, and `y` by metric,
    one point per step.

    With more than `max_points` steps (`thinned`), neighbours are merged such that each column keeps
    its minimum and maximum. None means "not measured at this step"; the strings "NaN", "Infinity",
    "-Infinity" were measured. left_out: names of the other metrics.
    """
    names = sorted(set[str]().union(*steps.values()))
    shown = names[:MAX_SERIES]
    max_points = min(max_points, max_values // max(len(shown), 1))
    order = sorted(steps)

    size = 1
    x = order
    if len(order) > max_points:
        size = -(-len(order) // (max_points // 2))
        x = []
        for start in range(0, len(order), size):
            bucket = order[start : start + size]
            x += [bucket[0], bucket[-1]][: len(bucket)]

    y = {}
    for name in shown:
        values = [steps[step].get(name) for step in order]
        points: list[float | None] = values
        if size > 1:
            points = []
            for start in range(0, len(values), size):
                points += _extremes(values[start : start + size])

        y[name] = [_point(value) for value in points[: len(x)]]

    return {"x": x, "y": y, "thinned": size > 1, "left_out": names[MAX_SERIES:]}


def _extremes(bucket: Sequence[float | None]) -> list[float | None]:
    """Two points for some steps: the minimum and the maximum, in order. What is not finite is
    never hidden."""
    known = [value for value in bucket if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    if len(finite) < len(known):
        odd = next(value for value in known if not math.isfinite(value))
        return [finite[0] if finite else None, odd]
    if len(known) < 2:
        return [*known, None, None][:2]

    low = min(known)
    high = max(known)
    if known.index(low) < known.index(high):
        return [low, high]

    return [high, low]


def _point(value: float | None) -> float | str | None:
    if value is None:
        return None
    if math.isfinite(value):
        return float(f"{value:.6g}")
    return json.dumps(value)


def wilson(share: float, number: float) -> tuple[float, float]:
    """The 95 % score interval of a share of `number` independent trials (Wilson, JASA 22:158,
    1927).

    Unlike the normal interval it stays within [0, 1], and has a width at shares of 0 and 1.
    """
    squared = Z_95 * Z_95 / number
    middle = (share + squared / 2) / (1 + squared)
    half = Z_95 * math.sqrt(share * (1 - share) / number + squared / (4 * number)) / (1 + squared)
    return max(middle - half, 0.0), min(middle + half, 1.0)
