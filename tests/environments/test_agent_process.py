"""What the functions of an agent find when they are loaded."""

import pytest

from distflow.environments.agent_process import Agent, client_variables
from distflow.errors import UserError

NAMES = [
    *(f"OPENAI_{what}" for what in ("BASE_URL", "API_BASE", "API_BASE_URL", "API_KEY")),
    *(f"ANTHROPIC_{what}" for what in ("BASE_URL", "API_BASE", "API_URL", "API_KEY", "AUTH_TOKEN")),
]
MODULE = f"""
import os
IMPORTED = dict(os.environ)

def seen():
    return [{{name: found.get(name) for name in {NAMES}}} for found in (IMPORTED, os.environ)]
"""


def test_clients_find_the_episode_and_no_key_or_address_of_the_users(tmp_path, monkeypatch):
    """Neither when the module is imported, nor in the episode. Frameworks have their own names for
    the address."""
    (tmp_path / "agent.py").write_text(MODULE)
    for name in NAMES:
        monkeypatch.setenv(name, "of the user")
    episode = "http://127.0.0.1:1/episodes/a"
    seen = Agent(f"{tmp_path}/agent.py:seen", (), None).run(client_variables(episode, "key"), {})
    assert isinstance(seen, list)

    for found, address, key in zip(
        seen, ("http://127.0.0.1:9", episode), ("of-the-episode", "key"), strict=True
    ):
        assert [found[name] for name in NAMES] == [
            *[f"{address}/v1"] * 3,
            key,
            *[address] * 3,
            key,
            None,
        ]


def test_further_arguments_reach_the_function_by_name(tmp_path):
    (tmp_path / "agent.py").write_text(
        "def scaled(prompt, factor, by=1): return [prompt, factor, by]\n"
    )
    agent = Agent(f"{tmp_path}/agent.py:scaled", (), None, ["factor"])
    assert agent.run({}, {"prompt": "1+1=", "row": {}, "factor": 3}) == ["1+1=", 3, 1]

    for name, said in (("factr", "is no parameter"), ("prompt", "is an argument of every agent")):
        with pytest.raises(UserError, match=f"'{name}' {said}"):
            Agent(f"{tmp_path}/agent.py:scaled", (), None, ["factor", name])

    with pytest.raises(UserError, match="'factor'"):
        Agent(f"{tmp_path}/agent.py:scaled", (), None)
