"""Domains, filters by reward result, reports of reward functions, in a real Chromium; hostile text
in every place."""

from pathlib import Path
from typing import Any

import pytest

from distflow.observe.report.build import write_report
from distflow.observe.writing.run_folder import RunFolder
from tests.observe.conftest import HOSTILE

pytestmark = pytest.mark.slow

IMAGE = (
    "<img src=x "
    'onerror="document.documentElement.dataset.hacked=1"><script>document.body.remove()</script>'
)
PROGRAM = "def add(a, b):\n    return a - b"
SAID = {
    "code": {
        "code/failed": [
            {"case": "assert add(1, 2) == 3", "why": "it returned -1", "printed": IMAGE}
        ],
        "code/program": PROGRAM,
        "code/sandbox": "floor",
        "code/seconds": 0.0213,
        "code/share": 0.5,
    },
    "math": {"math/extracted": None, "math/wanted": "7"},
    "ifeval": {"ifeval/followed": {"punctuation:no_comma": True, IMAGE: False}},
    IMAGE: {"judge/reason": "too\nshort", "judge/odd": {IMAGE: [HOSTILE[5]]}},
}
# Of the known names, but of other shapes.
ODD = {
    "code/failed": "none",
    "code/program": 3,
    "code/followed": [1],
    "code/reason": {"a": 1},
    "code/seconds": "soon",
}
ODD |= {"code/__proto__": 1, "code/constructor": "c", "code/wanted": {"x": 1}}
TALK = [
    {"owner": "prompt", "text": "what was asked"},
    {"owner": "policy", "text": IMAGE, "fork": "2.1"},
    {"owner": "tool", "text": "5"},
    {"owner": "environment", "text": "go on", "agent": "solver"},
    *(7, None, {"owner": {"x": 1}, "text": [2]}),
]


def write_run(folder: Path) -> Path:
    with RunFolder(folder, 0) as run:
        for step in (1, 2):
            run.samples(
                step,
                [row for i, domain in enumerate(SAID) for row in _group(10 * step + i, domain)],
            )

            values = {"reward/mean_score": 0.1 * step}
            for i, domain in enumerate(SAID):
                values |= {
                    f"reward/{domain}/mean_score": 0.1 * step * i,
                    f"domains/{domain}/groups": 1.0,
                }
                values |= {
                    f"domains/{domain}/calls": 3.0,
                    f"domains/{domain}/dropped/{IMAGE}": step,
                }

            run.metrics(step, "train", values)

        run.samples(
            2,
            [{**row, "dropped": IMAGE, "advantage": None} for row in _group(90, "math")],
            split="dropped",
        )

    return folder


def _group(prompt_group: int, domain: str) -> list[dict[str, Any]]:
    """Wrong with remarks, an error, out of time, right and left out of the loss, odd."""
    part = {"code": "code", "math": "math", "ifeval": "ifeval"}.get(domain, "judge")
    common = {
        "prompt": f"prompt {prompt_group}",
        "ground_truth": ["assert add(1, 2) == 3"],
        "domain": domain,
        "advantage": 0.0,
    }
    rows = [
        {"score": 0.0, "reward_parts": {part: 0.0}, "extra": SAID[domain]},
        {"score": 0.0, "errors": f"judge: {IMAGE}" if domain == "math" else None},
        {"score": 0.0, "errors": "no score within 10 s" if domain == "ifeval" else None},
        {"score": 1.0, "masked": 1.0 if domain == "code" else 0.0, "conversation": TALK},
        {"score": 1.0, "reward_parts": {"code": 1.0}, "extra": ODD},
    ]

    return [
        {**common, "uid": f"{prompt_group}-{i}", "response": f"answer {i}", **row}
        for i, row in enumerate(rows)
    ]


@pytest.fixture
def show(browser, tmp_path):
    """Opens the report, sets filters and gives the prompts that are left."""
    report = write_report(write_run(tmp_path / "run"))

    opened = set[int]()

    def show(width: int = 1280, **filters: str) -> list[str]:
        if width not in opened:
            browser.open(report.as_uri(), width=width)
            opened.add(width)

        browser.script("document.querySelector('.filters').reset()")
        for name, value in filters.items():
            browser.script(
                f"document.querySelector('.filters').elements['{name}'].value = {value!r}"
            )

        browser.script("document.querySelector('.filters').dispatchEvent(new Event('input'))")
        return browser.script(
            "[...document.querySelectorAll('tr.sample td:nth-last-child(2)')].map((c) => "
            "c.textContent)"
        )

    return show


def test_groups_are_filtered_by_domain_and_by_what_became_of_a_response(show):
    domains = sorted(SAID)
    assert sorted(show(domain=str(domains.index("math")))) == [
        "prompt 11",
        "prompt 21",
        "prompt 90",
    ]
    assert sorted(show(which="error")) == ["prompt 11", "prompt 21", "prompt 90"]
    assert sorted(show(which="timeout")) == ["prompt 12", "prompt 22"]
    assert sorted(show(which="masked")) == ["prompt 10", "prompt 20"]
    assert show(which="dropped") == ["prompt 90"]
    assert len(show(which="wrong")) == len(show(which="right")) == 9
    assert show(domain=str(domains.index("code")), which="masked", step="train 2") == ["prompt 20"]

    # Programs, printed text and errors are searched too.
    assert sorted(show(text="RETURN A - B")) == ["prompt 10", "prompt 20"]
    assert sorted(show(text="no score within")) == ["prompt 12", "prompt 22"]
    assert show(low="0.9") == []


def test_what_verifiers_said_is_readable_and_stays_text(show, browser):
    show()
    opened = "document.querySelectorAll('tr.sample .open').forEach((b) => b.click())"
    browser.script(opened)
    browser.script(
        "document.querySelectorAll('details.program').forEach((d) => { d.open = true; })"
    )
    text = browser.script("document.querySelector('#samples').innerText")

    for text_shown in (
        "assert add(1, 2) == 3",
        "it returned -1",
        "it printed",
        ("the program, 2 lines"),
        PROGRAM,
        "sandboxfloor",
        "took0.021 s",
        "no answer was found",
        "compared with",
        "punctuation:no_comma",
        ("not followed"),
        ("too\nshort"),
        "out of time: no score within 10 s",
        f"reward error: judge: {IMAGE}",
        ("left out of the loss"),
        f"dropped: {IMAGE}",
        "constructorc",
        "__proto__1",
        "prompt (given)\nwhat was asked",
        f"fork 2.1: policy (drawn)\n{IMAGE}",
        "solver: environment (given)\ngo on",
    ):
        assert text_shown in text.replace("\xa0", " "), text_shown

    pipeline = browser.script(
        "getComputedStyle(document.querySelector('details.program .text')).whiteSpace"
    )
    assert pipeline == "pre-wrap", "line breaks are seen"
    colors = (
        "[...new Set([...document.querySelectorAll('.turn')].map((t) => "
        "getComputedStyle(t).borderLeftColor))]"
    )
    assert len(browser.script(colors)) == 5, "one for each owner, and one for what is none"
    assert "U+202E" in text and browser.script("document.documentElement.dataset.hacked") is None
    assert browser.script("document.querySelectorAll('img, #samples script').length") == 0
    assert browser.complaints() == [] and len(browser.requests()) == 1


def test_a_run_without_domains_has_no_filter_of_them(browser, make_run):
    browser.open(write_report(make_run()).as_uri())
    assert browser.script("document.querySelector('.by-domain').offsetParent === null")
