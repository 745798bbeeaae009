"""The page of the report: the template with its data, its style and its scripts inside.

The few numbers to read first.
"""

import base64
import hashlib
import html
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from distflow.observe.files import encode
from distflow.observe.report.summary import REWARD, Accuracy, Steps, known_values, readable_s
from distflow.observe.report.timeline import wilson
from distflow.observe.sanitize import escape_control

SCRIPTS = (
    "text.js",
    "top.js",
    "curves.js",
    "figures.js",
    "step.js",
    "timeline.js",
    "domains.js",
    "reward_results.js",
    "samples.js",
    "report.js",
)


def page(data: Mapping[str, Any]) -> bytes:
    """The template filled in with what `report_data` found. Only the two scripts and the style with the hashes named in
    the policy may act."""
    static = files("distflow.observe.report") / "static"

    def read(name: str) -> str:
        text = (static / name).read_text(encoding="utf-8")
        assert "</script" not in text.lower() and "</style" not in text.lower(), f"{name} would end its own tag"
        return text

    plot = read("uplot/uPlot.iife.min.js")
    script = "\n".join(read(name) for name in SCRIPTS)
    style = read("uplot/uPlot.min.css") + "\n" + read("report.css")
    policy = (
        f"default-src 'none'; script-src {_hash(plot)} {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    filled = Template((static / "report.html").read_text(encoding="utf-8")).substitute(
        policy=html.escape(policy, quote=True).replace("&#x27;", "'"),
        title=_text(data["title"]),
        status=_text(data["status"]["word"]),
        sentences="\n".join(_paragraphs(data)),
        style=style,
        plot=plot,
        script=script,
        data=embed(data),
    )
    return filled.encode("utf-8", "backslashreplace")


def _paragraphs(data: Mapping[str, Any]) -> list[str]:
    """The sentences on top; the whole error stands behind the first, which tells how the run ended."""
    found = [
        f'<p class="{sentence["tone"]}">{_text(sentence["text"])}'
        + (f' <span class="advice">{_text(sentence["advice"])}</span>' if sentence["advice"] else "")
        + "</p>"
        for sentence in data["sentences"]
    ]
    if data["failure"]:
        found.insert(1, f'<div id="failure">{html.escape(escape_control(data["failure"]["message"]))}</div>')
    return found


def embed(data: object) -> str:
    """JSON that stays data inside a script tag: no "<" in it can end or open anything."""
    return encode(data).decode("utf-8").replace("<", "\\u003c")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(text: str) -> str:
    return html.escape(escape_control(text, one_line=True))


def tiles(accuracy: Accuracy | None, steps: Steps) -> list[dict[str, str]]:
    """The few numbers to read first: label, value, and a line below."""
    found = _accuracy_tiles(accuracy) if accuracy else []
    for label, name in (("reward", REWARD), ("loss", "sft/loss"), ("validation loss", "sft/val_loss")):
        values = known_values(steps, name)
        if values:
            found.append(_tile(label, f"{values[-1]:.3g}", f"{values[0]:.3g} at first"))
    speeds = sorted(known_values(steps, "throughput/tokens_per_s"))
    if speeds:
        found.append(_tile("tokens a second", f"{speeds[len(speeds) // 2]:,.0f}", "median of the steps"))
    seconds = known_values(steps, "timing_s/step")
    if seconds:
        found.append(_tile("steps", f"{len(seconds):,}", f"in {readable_s(sum(seconds))}"))
    return found


def _accuracy_tiles(accuracy: Accuracy) -> list[dict[str, str]]:
    (first_step, first), (last_step, last) = accuracy.points[0], accuracy.points[-1]
    where = "before RL" if accuracy.before_training else f"at step {first_step}"
    found = [_tile(f"accuracy {where}", f"{first:.2f}", _likely(accuracy, first))]
    if len(accuracy.points) > 1:
        best_step, best = accuracy.best
        found.append(_tile(f"accuracy at step {last_step}", f"{last:.2f}", _likely(accuracy, last)))
        if best > last:
            found.append(_tile("best accuracy", f"{best:.2f}", f"at step {best_step}"))
    return found


def _likely(accuracy: Accuracy, share: float) -> str:
    """Between what the accuracy lies, where it is a share of a known number."""
    if not accuracy.num_problems or not 0 <= share <= 1:
        return "on validation problems"
    low, high = wilson(share, accuracy.num_problems)
    return f"95 %: {low:.2f} to {high:.2f}"


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}
