"""The charts of the report: each asks one question, and shows the metrics that answer it.

Also histograms of training responses at the start and at the end of a run.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypeAlias, TypedDict, cast

from distflow.observe.crash_safe_files import JSON, MAX_NUMBER
from distflow.observe.metrics import find_metric, read_table
from distflow.observe.run_reader import MetricsRecord, Timeline, read_samples, sample_steps

if TYPE_CHECKING:
    import numpy as np

Column: TypeAlias = Sequence[float | str | None]

MAX_POINTS = 1500
MAX_SERIES = 300
MAX_VALUES = 150_000
MAX_BINS = 24
_FEW_VALUES = 12
_MAX_STEPS = 5
_STALENESS = "staleness of the oldest token"
_SPEED = "throughput/tokens_per_s"
Z_95 = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""
_MAX_LINES = 8


class ChosenChart(TypedDict):
    """A chart in the page's form, with the metrics that it shows. labels: for names that are not
    clear enough. colors: by metric, if a line has the same color in several charts."""

    question: str
    kind: Literal["line", "stack"]
    unit: str
    names: list[str]
    labels: NotRequired[dict[str, str]]
    colors: NotRequired[dict[str, int]]


_NUM_FIRST = 2


def choose_charts(
    names: Iterable[str], by_domain: Sequence[ChosenChart] = ()
) -> tuple[list[ChosenChart], list[str]]:
    """The charts that have data, and the names that no chart shows.

    A metric is in the first chart that accepts it; a chart has at most 8 lines (a stack has all).
    by_domain: charts already chosen; they come after those of accuracy and reward.
    """
    by_domain_names = {name for chart in by_domain for name in chart["names"]}
    remaining = sorted(set(names) - by_domain_names)
    charts: list[ChosenChart] = []
    for position, chart in enumerate(read_table("charts.toml")["charts"]):
        if position == _NUM_FIRST:
            charts += by_domain
        matching: list[str] = []
        for pattern in chart["patterns"]:
            fits = re.compile(pattern).fullmatch
            matching += [name for name in remaining if fits(name) and name not in matching]
        if chart["kind"] == "line":
            matching = matching[:_MAX_LINES]
        if matching:
            shown = {key: chart[key] for key in ("question", "kind", "unit")}
            charts.append(cast(ChosenChart, {**shown, "names": matching}))
            remaining = [name for name in remaining if name not in matching]
    return charts, remaining


def set_constants_apart(
    charts: Sequence[ChosenChart], others: Sequence[str], columns: Mapping[str, Column]
) -> tuple[list[ChosenChart], list[str], list[dict[str, object]]]:
    """The charts with varying lines, the other varying metrics, and name, value and unit of those
    that were constant or measured once: they need no chart.

    A stack keeps all of its layers as long as one varies.
    """
    still = {name for name, column in columns.items() if _is_constant(column)}
    moving: list[ChosenChart] = []
    drawn = set[str]()
    for chart in charts:
        names = chart["names"]
        if chart["kind"] == "line":
            names = [name for name in names if name not in still]
        if not still.issuperset(names):
            moving.append({**chart, "names": names})
            drawn.update(names)
    constants: list[dict[str, object]] = []
    for name in sorted(still - drawn):
        known = _known(columns[name])
        if known:
            constants.append({"name": name, "value": known[0], "unit": unit_of(name)})
    return moving, [name for name in others if name not in still], constants


def unit_of(name: str) -> str:
    """The unit in which the report shows the metric."""
    metric = find_metric(name)
    if metric is None:
        return ""
    return "GiB" if metric.unit == "bytes" else metric.unit


def _is_constant(column: Sequence[float | str | None]) -> bool:
    """Whether values are equal, apart from rounding."""
    known = _known(column)
    numbers = [value for value in known if isinstance(value, float)]
    if len(numbers) < len(known):
        return len(set(known)) == 1
    if not numbers:
        return True
    largest = max(abs(max(numbers)), abs(min(numbers)))
    return max(numbers) - min(numbers) <= 1e-9 * largest


def _known(column: Sequence[float | str | None]) -> list[float | str]:
    return [value for value in column if value is not None]


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


class Table(NamedTuple):
    """All metrics of all steps, a row for each step. measured: where `values` are."""

    order: list[int]
    places: dict[str, int]
    values: "np.ndarray[Any, Any]"
    measured: "np.ndarray[Any, Any]"


def as_table(steps: Mapping[int, Mapping[str, float]]) -> Table:
    import numpy as np

    order = sorted(steps)
    alike = dict[tuple[str, ...], list[int]]()
    for row, step in enumerate(order):
        alike.setdefault(tuple(steps[step]), []).append(row)
    places = {
        name: place
        for place, name in enumerate(sorted({name for names in alike for name in names}))
    }
    values = np.zeros((len(order), len(places)))
    measured = np.zeros((len(order), len(places)), bool)
    for names, rows in alike.items():
        cells = np.ix_(rows, [places[name] for name in names])
        values[cells] = [[*steps[order[row]].values()] for row in rows]
        measured[cells] = True
    return Table(order, places, values, measured)


def series(
    steps: Mapping[int, Mapping[str, float]],
    max_points: int = MAX_POINTS,
    max_values: int = MAX_VALUES,
    wanted: Iterable[str] | None = None,
    table: Table | None = None,
) -> dict[str, Any]:
    """Columns for the charts, of at most `MAX_SERIES` metrics: `x`, the steps, and `y` by metric,
    one point per step.

    With more than `max_points` steps (`thinned`), neighbours are merged such that each column keeps
    its minimum and maximum. None means "not measured at this step"; the strings "NaN", "Infinity",
    "-Infinity" were measured. left_out: names of the other metrics. wanted: the metrics to take;
    None for all. table: of the steps, if it is known.
    """
    names = sorted(set[str]().union(*steps.values()) if wanted is None else wanted)
    shown = names[:MAX_SERIES]
    left_out = names[MAX_SERIES:]
    max_points = min(max_points, max_values // max(len(shown), 1))
    order = sorted(steps)
    if len(order) <= max_points:
        y = {name: [_point(steps[step].get(name)) for step in order] for name in shown}
        return {"x": order, "y": y, "thinned": False, "left_out": left_out}
    size = -(-len(order) // (max_points // 2))
    buckets = [order[start : start + size] for start in range(0, len(order), size)]
    x = [step for bucket in buckets for step in (bucket[0], bucket[-1])[: len(bucket)]]
    table = table or as_table(steps)
    y = {name: _merged(size, table, table.places[name])[: len(x)] for name in shown}
    return {"x": x, "y": y, "thinned": True, "left_out": left_out}


def _merged(size: int, table: Table, place: int) -> list[float | str | None]:
    """Two points for each `size` steps: the minimum and the maximum, in order; a single one stays
    where it is, and a NaN is never hidden."""
    import numpy as np

    blank = -len(table.order) % size
    values = np.pad(table.values[:, place], (0, blank)).reshape(-1, size)
    measured = np.pad(table.measured[:, place], (0, blank)).reshape(-1, size)
    finite = measured & np.isfinite(values)
    low = np.where(finite, values, np.inf)
    high = np.where(finite, values, -np.inf)
    lowest = low.argmin(1)
    highest = high.argmax(1)
    # places in a bucket
    ends = np.stack([np.minimum(lowest, highest), np.maximum(lowest, highest)], 1)
    points: list[float | str | None] = [
        _point(v) for v in np.take_along_axis(values, ends, 1).ravel().tolist()
    ]
    number = measured.sum(1)
    odd = measured & ~finite
    for bucket in np.flatnonzero((number < 2) | odd.any(1)).tolist():
        known = np.flatnonzero(measured[bucket])
        of_bucket: list[float | str | None] = [None, None]
        if len(known) == 1:
            last = min(size, len(table.order) - bucket * size) - 1
            steps = table.order[bucket * size :]
            is_late = steps[known[0]] - steps[0] > steps[last] - steps[known[0]]
            of_bucket[is_late and last > 0] = _point(values[bucket, known[0]])
        elif len(known):
            first = [points[2 * bucket]] if finite[bucket].any() else []
            of_bucket = [*first, _point(values[bucket, odd[bucket]][0]), None][:2]
        points[2 * bucket : 2 * bucket + 2] = of_bucket
    return points


def axes(
    x: Sequence[int], records: Sequence[MetricsRecord], samples_of_a_step: int | None
) -> dict[str, list[float]]:
    """What may stand in place of the steps `x`: hours since the first record, tokens and samples
    trained on so far. None of them decreases."""
    begin = min((record.t for record in records), default=0.0)
    hours = 0.0
    tokens = 0.0
    at: dict[int, tuple[float, float]] = {}
    for record in records:
        hours = max(hours, (record.t - begin) / 3600)
        if record.kind == "train":
            used = record.values.get(_SPEED, 0.0) * record.values.get("timing_s/step", 0.0)
            tokens += used if math.isfinite(used) else 0.0
        at[record.step] = (float(f"{hours:.6g}"), float(f"{tokens:.6g}"))
    found = {"hours": [at[step][0] for step in x]}
    if tokens:
        found["tokens"] = [at[step][1] for step in x]
    if samples_of_a_step:
        found["samples"] = [float(step * samples_of_a_step) for step in x]
    return found


def _point(value: float | None) -> float | str | None:
    if value is None:
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else json.dumps(value)


def histograms(run_dir: Path, timeline: Timeline) -> list[dict[str, Any]]:
    """Histograms of lengths and rewards in training, and of staleness if any response is stale,
    over the first and the last tenth of the steps, at most 5 each."""
    ends = _ends(run_dir, timeline)
    lengths = {}
    rewards = {}
    stale = {}
    for name, rows in ends.items():
        lengths[name] = _numbers(rows, "response_length")
        rewards[name] = _numbers([row for row in rows if not row.get("errors")], "score")
        stale[name] = _numbers(rows, _STALENESS)
    found = []
    if any(lengths.values()):
        found.append(histogram("How long are the responses?", "tokens", lengths))
    if any(rewards.values()):
        found.append(histogram("Which rewards do they get?", "reward", rewards))
    if any(map(any, stale.values())):
        found.append(histogram("How stale are they when trained on?", "steps", stale))
    return found


def histogram(title: str, unit: str, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A few distinct values have a bin each; more share bins of equal width, at most `MAX_BINS`.

    values: at least one, all finite, by the name of their part, e.g. early and late responses.
    Returns the bins' labels, and for each part the number of its values and their shares in the
    bins.
    """
    different = sorted({value for part in values.values() for value in part})
    if len(different) <= _FEW_VALUES:
        bins = [f"{value:.4g}" for value in different]
        place = {value: i for i, value in enumerate(different)}
    else:
        whole = all(value % 1 == 0 for value in different)
        width = _width(different[-1] - different[0], whole)
        place = {value: math.floor(value / width + 1e-9) for value in different}
        first = place[different[0]]
        last = place[different[-1]]
        place = {value: i - first for value, i in place.items()}
        bins = [_range(i * width, width, whole) for i in range(first, last + 1)]
    parts = []
    for name, part in values.items():
        if part:
            counts = Counter(place[value] for value in part)
            shares = [float(f"{counts[i] / len(part):.4g}") for i in range(len(bins))]
            parts.append({"name": name, "number": len(part), "shares": shares})
    return {"title": title, "unit": unit, "bins": bins, "parts": parts}


def _width(span: float, whole: bool) -> float:
    """The bin width: 1, 2 or 5 times a power of ten, such that the bins suffice; at least 1 for
    whole numbers."""
    least = span / (MAX_BINS - 1)
    power = 10.0 ** math.floor(math.log10(least))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    return max(width, 1.0) if whole else width


def _range(start: float, width: float, whole: bool) -> str:
    if whole:
        return f"{start:.0f}" if width == 1 else f"{start:.0f} to {start + width - 1:.0f}"
    return f"{start:.4g} to {start + width:.4g}"


def _ends(run_dir: Path, timeline: Timeline) -> dict[str, list[dict[str, JSON]]]:
    """The responses of the first and of the last steps, by the name of those steps; of all if there
    are few."""
    steps = sample_steps(run_dir)
    size = min(max(len(steps) // 10, 1), _MAX_STEPS)
    chosen = [steps[:size], steps[-size:]] if len(steps) > size else [steps]
    ends = {}
    for part in chosen:
        rows = []
        for step in part:
            for row in read_samples(run_dir, step, "train", timeline):
                rows.append(_with_staleness(row, step))
        if rows:
            ends[f"step {part[0]}" if len(part) == 1 else f"steps {part[0]} to {part[-1]}"] = rows
    return ends


def _with_staleness(row: dict[str, JSON], step: int) -> dict[str, JSON]:
    """The row with its staleness in steps; a step, counted from 1, trains weights of the version
    before it."""
    versions = row.get("versions")
    known = [v for v in versions if isinstance(v, int)] if isinstance(versions, list) else []
    return {**row, _STALENESS: step - 1 - min(known)} if known else row


def _numbers(rows: Sequence[Mapping[str, JSON]], key: str) -> list[float]:
    found = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if abs(value) <= MAX_NUMBER:
            found.append(float(value))
    return found


def wilson(share: float, number: float) -> tuple[float, float]:
    """The 95 % score interval of a share of `number` independent trials (Wilson, JASA 22:158,
    1927).

    Unlike the normal interval it stays within [0, 1], and has a width at shares of 0 and 1.
    """
    squared = Z_95 * Z_95 / number
    middle = (share + squared / 2) / (1 + squared)
    half = Z_95 * math.sqrt(share * (1 - share) / number + squared / (4 * number)) / (1 + squared)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def error_bars(
    columns: Mapping[str, Sequence[float | str | None]], trials: Mapping[str, int]
) -> dict[str, list[list[float] | None]]:
    """An interval for each value of the columns `val_correct/DOMAIN/...`, None if there is no
    share.

    trials: the number of validation problems by domain and of "all". Several responses to a problem
    are one trial.
    """
    bars: dict[str, list[list[float] | None]] = {}
    for name, values in columns.items():
        group, _, rest = name.partition("/")
        number = trials.get(rest.rpartition("/")[0], 0)
        if group != "val_correct" or not number:
            continue
        bars[name] = []
        for value in values:
            interval = None
            if isinstance(value, float) and 0 <= value <= 1:
                interval = [float(f"{end:.4g}") for end in wilson(value, number)]
            bars[name].append(interval)
    return bars
