"""The class of docs/tools.md with a real game of textarena, unchanged."""

import re
from pathlib import Path

import pytest

from distflow.environments.environment_workflow import EnvironmentWorkflow
from tests.environments.test_environment_workflow import given, play

pytestmark = pytest.mark.slow
pytest.importorskip("textarena", reason="wants textarena: make test-agents")

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"


def test_a_game_is_played_to_its_end(tmp_path):
    found = re.search(r"```py\n# arena.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "arena.py").write_text(found[1])
    workflow = EnvironmentWorkflow(
        env=f"{tmp_path}/arena.py:Arena",
        env_kwargs={"game": "GuessTheNumber-v0"},
        max_turns=30,
        timeout_s=120.0,
    )
    score, chat = play(workflow, [f"[{number}]" for number in range(1, 21)], response=4000, seed=3)
    assert score == 1.0 and chat.finish_reason == "stop"
    assert "Guess The Number" in given(chat)[0]
    assert all("higher" in text and "Guess The Number" not in text for text in given(chat)[1:])
    assert given(chat)[1].count("higher") == given(chat)[-1].count("higher") == 1
