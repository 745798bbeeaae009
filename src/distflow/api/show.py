"""A run as a notebook shows it: what it reached, its curve, where to look further."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from distflow.observe.metrics import headlines
from distflow.observe.report_summary import REWARD
from distflow.observe.text import visible

_WIDTH, _HEIGHT = 240, 40


def run_html(
    status: str,
    accuracy: tuple[float | None, float | None],
    trained: Sequence[Mapping[str, object]],
    folder: Path,
    report: Path,
) -> str:
    """A table of few rows; all text is text. accuracy: before and after. trained: the metrics of each step."""
    before, after = accuracy
    rows = {"status": status}
    if after is not None:
        was = f"{before:.3f} before, " if before is not None else ""
        rows["accuracy"] = f"{was}{after:.3f} now"
    if trained:
        numbers = {name: value for name, value in trained[-1].items() if isinstance(value, float)}
        rows |= {line.label: line.text(value).strip() for line, value in headlines(numbers).items()}
    rows |= {"folder": str(folder), "report": str(report)}
    cells = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows.items())
    rewards = [value for row in trained if isinstance(value := row.get(REWARD), float) and math.isfinite(value)]
    curve = f"<tr><th>reward by step</th><td>{_curve(rewards)}</td></tr>" if len(rewards) > 1 else ""
    return f"<table><tbody>{cells}{curve}</tbody></table>"


def _curve(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    height = (high - low) or 1.0
    points = " ".join(
        f"{i * _WIDTH / (len(values) - 1):.1f},{_HEIGHT - (value - low) / height * _HEIGHT:.1f}"
        for i, value in enumerate(values)
    )
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}"'
    return f"{low:.3g} <svg {size}>{line}</svg> {high:.3g}"


def _text(text: str) -> str:
    return html.escape(visible(text, one_line=True))
