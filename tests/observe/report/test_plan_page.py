"""The page of `distflow plan` in a real Chromium: it draws its graph, time line and memory, and
asks for nothing."""

from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main

pytestmark = pytest.mark.slow

WORDS = [
    "async_grpo",
    "actor_rollout_ref.model.path=qwen2.5-7b",
    "--device",
    "h100",
    "trainer.launcher=ray",
]
WORDS += [
    "trainer.allocation=embedded:d4+fsdp:d4",
    "trainer.total_training_steps=10",
    "async.max_staleness=1",
]
WORDS += [
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.rollout.max_num_seqs=64",
]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_draws_and_asks_for_nothing(tmp_path: Path, browser: Any, theme: str) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", *WORDS, "--simulate", "2", "--html", str(page)]) == 0
    browser.open(page.as_uri(), height=3000, theme=theme)
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    shown = browser.script(
        "[...document.querySelectorAll('#facts *')].map((each) => each.textContent).join(' ')"
    )
    assert "8 h100" in shown and "simulated step" in shown
    hidden = browser.script(
        "['step', 'pipeline', 'timeline'].filter((id) => document.getElementById(id).hidden)"
    )
    assert hidden == []
    drawn = (
        "[...document.querySelectorAll('{0} rect')].filter((each) => "
        "each.getBoundingClientRect().width > 1).length"
    )
    assert browser.script(drawn.format("#memory")) >= 2 * 5  # both kinds of workers in each phase
    assert browser.script(drawn.format("#timeline")) >= 4
    named = browser.script("document.querySelector('#timeline .legend').textContent")
    assert "actor_train" in named and "generate" in named  # a bar may be too narrow for its name
    nodes = browser.script("document.querySelector('#pipeline svg').textContent")
    assert "rollout_actor" in nodes and "actor_train" in nodes


def test_each_part_of_the_memory_has_a_color_of_its_own(tmp_path: Path, browser: Any) -> None:
    page = tmp_path / "plan.html"
    words = [
        "grpo",
        "actor_rollout_ref.model.path=qwen2.5-7b",
        "--device",
        "h100",
        "trainer.total_training_steps=1",
    ]
    assert main(["plan", *words, "--html", str(page)]) == 2  # it does not fit
    browser.open(page.as_uri())
    bars = "[...document.querySelector('#memory svg').querySelectorAll('rect')]"
    colors = browser.script(f"{bars}.map((each) => each.getAttribute('fill'))")
    assert len(colors) > 12 and len(set(colors)) == len(colors)
