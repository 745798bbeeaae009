"""Histograms of what the answers of training looked like, at the start of a run and at its end."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from distflow.observe.jsonlines import JSON
from distflow.observe.run_reader import Timeline, read_samples, sample_steps

MAX_BINS = 24
_FEW_VALUES = 12
_MAX_STEPS = 5
_STALENESS = "staleness of the oldest token"


class Part(TypedDict):
    """name: which answers. number: how many. shares: of them, in each bin."""

    name: str
    number: int
    shares: list[float]


class Histogram(TypedDict):
    """bins: what each holds, in words; parts: early and late answers, over the same bins."""

    title: str
    unit: str
    bins: list[str]
    parts: list[Part]


def histograms(run_dir: Path, timeline: Timeline) -> list[Histogram]:
    """Of the lengths and of the rewards in training, and of the staleness where any answer is stale, over the first and
    the last tenth of the steps, at most 5 each."""
    ends = _ends(run_dir, timeline)
    lengths = {name: _numbers(rows, "response_length") for name, rows in ends.items()}
    judged = {name: [row for row in rows if not row.get("errors")] for name, rows in ends.items()}
    rewards = {name: _numbers(rows, "score") for name, rows in judged.items()}
    stale = {name: _numbers(rows, _STALENESS) for name, rows in ends.items()}
    asked = (
        ("How long are the answers?", "tokens", lengths),
        ("Which rewards do they get?", "reward", rewards),
        ("How stale are they when trained on?", "steps", stale if any(map(any, stale.values())) else {}),
    )
    return [histogram(title, unit, values) for title, unit, values in asked if any(values.values())]


def histogram(title: str, unit: str, values: Mapping[str, Sequence[float]]) -> Histogram:
    """Each of a few different values has a bin of its own; more share bins of one width, at most `MAX_BINS`.

    values: at least one, all finite, by the name of their part.
    """
    different = sorted({value for part in values.values() for value in part})
    if len(different) <= _FEW_VALUES:
        bins = [f"{value:.4g}" for value in different]
        place = {value: i for i, value in enumerate(different)}
    else:
        whole = all(value % 1 == 0 for value in different)
        width = _width(different[-1] - different[0], whole)
        place = {value: math.floor(value / width + 1e-9) for value in different}
        first, last = place[different[0]], place[different[-1]]
        place = {value: i - first for value, i in place.items()}
        bins = [_range(i * width, width, whole) for i in range(first, last + 1)]
    parts = [_part(name, part, place, len(bins)) for name, part in values.items() if part]
    return {"title": title, "unit": unit, "bins": bins, "parts": parts}


def _part(name: str, values: Sequence[float], place: Mapping[float, int], num_bins: int) -> Part:
    counts = Counter(place[value] for value in values)
    shares = [float(f"{counts[i] / len(values):.4g}") for i in range(num_bins)]
    return {"name": name, "number": len(values), "shares": shares}


def _width(span: float, whole: bool) -> float:
    """1, 2 or 5 times a power of ten, such that the bins suffice; 1 or more for whole numbers."""
    least = span / (MAX_BINS - 1)
    power = 10.0 ** math.floor(math.log10(least))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    return max(width, 1.0) if whole else width


def _range(start: float, width: float, whole: bool) -> str:
    if whole:
        return f"{start:.0f}" if width == 1 else f"{start:.0f} to {start + width - 1:.0f}"
    return f"{start:.4g} to {start + width:.4g}"


def _ends(run_dir: Path, timeline: Timeline) -> dict[str, list[dict[str, JSON]]]:
    """The answers of the first and of the last steps, by the name of those steps; of all where there are few."""
    steps = sample_steps(run_dir)
    size = min(max(len(steps) // 10, 1), _MAX_STEPS)
    chosen = [steps[:size], steps[-size:]] if len(steps) > size else [steps]
    rows = {
        _steps(part): [
            _with_staleness(row, step) for step in part for row in read_samples(run_dir, step, "train", timeline)
        ]
        for part in chosen
        if part
    }
    return {name: found for name, found in rows.items() if found}


def _with_staleness(row: dict[str, JSON], step: int) -> dict[str, JSON]:
    """In steps; the step that is counted from 1 trains weights of the version before it."""
    versions = row.get("versions")
    made = [v for v in versions if isinstance(v, int)] if isinstance(versions, list) else []
    return {**row, _STALENESS: step - 1 - min(made)} if made else row


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _numbers(rows: Sequence[Mapping[str, JSON]], key: str) -> list[float]:
    return [
        float(value)
        for row in rows
        if isinstance(value := row.get(key), int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
