"""What the functions of an agent find when they are loaded."""

from pathlib import Path

import pytest

from distflow.environments.agent_process import Agent
from distflow.errors import UserError

MODULE = """
import os
NAMES = [f"{api}_{what}" for api in ("OPENAI", "ANTHROPIC") for what in ("BASE_URL", "API_KEY", "AUTH_TOKEN")]
SEEN = {name: os.environ.get(name) for name in NAMES}

def seen():
    return SEEN
"""


def test_a_client_made_when_the_module_is_imported_has_no_key_or_address_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(MODULE)
    for api in ("OPENAI", "ANTHROPIC"):
        for what in ("BASE_URL", "API_KEY"):
            monkeypatch.setenv(f"{api}_{what}", "of the user")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "of the user")
    seen = Agent(f"{tmp_path}/agent.py:seen", (), None).run({}, {})
    assert isinstance(seen, dict) and "of the user" not in seen.values()
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:") and seen["ANTHROPIC_API_KEY"]


def test_further_arguments_reach_the_function_by_name(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def scaled(prompt, factor, by=1): return [prompt, factor, by]\n")
    agent = Agent(f"{tmp_path}/agent.py:scaled", (), None, ["factor"])
    assert agent.run({}, {"prompt": "1+1=", "row": {}, "factor": 3}) == ["1+1=", 3, 1]
    for name, said in (("factr", "is no parameter"), ("prompt", "is an argument of every agent")):
        with pytest.raises(UserError, match=f"'{name}' {said}"):
            Agent(f"{tmp_path}/agent.py:scaled", (), None, ["factor", name])
    with pytest.raises(UserError, match="'factor'"):
        Agent(f"{tmp_path}/agent.py:scaled", (), None)
