"""The HTML of a report and of the dashboard: one template, with its scripts inside or served."""

import base64
import hashlib
import html
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from distflow.observe.crash_safe_files import encode
from distflow.observe.sanitized_output import escape_control

PAGE_BYTES = 130_000
"""Size of a page without its data."""

_PARTS = (
    *(
        "dom",
        "page_data",
        "summary_and_problems",
        "curves",
    ),
    *("step_times", "response_remarks", "samples", "config_and_events"),
)
SCRIPTS = (*_PARTS, "report")
POLICY_OF_SERVED_PAGES = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; base-uri 'none'; form-action 'none'"
)


def page(data: Mapping[str, Any]) -> bytes:
    """The template filled in with the result of `report_data`. Only the scripts and the style with
    hashes in the policy may run."""
    static = files("distflow.observe.report") / "static"
    words = {"title": data["title"], "kind": "report", "status": data["status"]["word"]}

    def read(name: str) -> str:
        text = (static / name).read_text(encoding="utf-8")
        assert "</script" not in text.lower() and "</style" not in text.lower(), (
            f"{name} would end its own tag"
        )
        return text

    own = "\n".join(read(f"{name}.js") for name in SCRIPTS)
    scripts = [read("uplot/uPlot.iife.min.js"), own]
    style = f"{read('uplot/uPlot.min.css')}\n{read('report.css')}"
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src "
        f"{_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    filled = _template().substitute(
        {name: _text(text) for name, text in words.items()},
        policy=html.escape(policy, quote=True).replace("&#x27;", "'"),
        sentences="\n".join(_paragraphs(data)),
        styles=f"<style>{style}</style>",
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        data=embed(data),
    )

    return filled.encode("utf-8", "backslashreplace")


def _template() -> Template:
    static = files("distflow.observe.report") / "static"
    parts = [(static / name).read_text(encoding="utf-8") for name in ("head.html", "report.html")]
    return Template("".join(parts))


def served_files() -> dict[str, bytes]:
    """The scripts and styles of a report, and those of a dashboard, by name."""
    static = files("distflow.observe.report") / "static"
    names = [f"{name}.js" for name in (*_PARTS, "dashboard")] + ["report.css"]
    libraries = ("uPlot.iife.min.js", "uPlot.min.css")
    return {name: (static / name).read_bytes() for name in names} | {
        name: (static / "uplot" / name).read_bytes() for name in libraries
    }


def served_page(data: Mapping[str, object], title: str) -> bytes:
    """The frame of a report whose scripts are served and ask for their data. data: what they start
    with."""
    styles = "\n".join(
        f'<link rel="stylesheet" href="/static/{name}.css">' for name in ("uPlot.min", "report")
    )
    scripts = "\n".join(
        f'<script src="/static/{name}.js"></script>'
        for name in ("uPlot.iife.min", *_PARTS, "dashboard")
    )
    words = {
        "title": _text(title),
        "kind": "dashboard",
        "status": "",
        "sentences": "",
        "data": embed(data),
    }
    words["policy"] = POLICY_OF_SERVED_PAGES
    filled = _template().substitute(words, styles=styles, scripts=scripts)

    return filled.encode("utf-8", "backslashreplace")


def _paragraphs(data: Mapping[str, Any]) -> list[str]:
    """The sentences at the top; the full error follows the first, which says how the run ended."""
    paragraphs = []
    for sentence in data["sentences"]:
        text = _text(sentence["text"])
        if sentence["advice"]:
            text += f' <span class="advice">{_text(sentence["advice"])}</span>'
        paragraphs.append(f'<p class="{sentence["tone"]}">{text}</p>')

    if data["failure"]:
        message = html.escape(escape_control(data["failure"]["message"]))
        paragraphs.insert(1, f'<div id="failure">{message}</div>')

    return paragraphs


def embed(data: object) -> str:
    """JSON that stays data inside a script tag: no "<" in it can end or open anything."""
    return encode(data).decode("utf-8").replace("<", "\\u003c")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(text: str) -> str:
    return html.escape(escape_control(text, one_line=True))
