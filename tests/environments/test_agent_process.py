"""What the functions of an agent find when they are loaded."""

from pathlib import Path

import pytest

from distflow.environments.agent_process import Agent

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
