"""The page of the report: the template with its data, its style and its scripts inside."""

import base64
import hashlib
import html
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from distflow.observe.jsonlines import encode
from distflow.observe.text import visible

SCRIPTS = (
    "text.js",
    "top.js",
    "curves.js",
    "figures.js",
    "step.js",
    "timeline.js",
    "domains.js",
    "verdicts.js",
    "samples.js",
    "report.js",
)


def page(data: Mapping[str, Any]) -> bytes:
    """The template filled in with what `report_data` found. Only the two scripts and the style with the hashes named in
    the policy may act."""
    static = files("distflow.observe") / "static"

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
        found.insert(1, f'<div id="failure">{html.escape(visible(data["failure"]["message"]))}</div>')
    return found


def embed(data: object) -> str:
    """JSON that stays data inside a script tag: no "<" in it can end or open anything."""
    return encode(data).decode("utf-8").replace("<", "\\u003c")


def _hash(source: str) -> str:
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(text: str) -> str:
    return html.escape(visible(text, one_line=True))
