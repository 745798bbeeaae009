"""Environments of the package `verifiers`, unchanged: turns, tools and rewards of their own.
`make test-verifiers` installs it, as its OpenAI client is older than that of the other extras."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="wants the extra verifiers: make test-verifiers")

from distflow.data.dataset_columns import Columns  # noqa: E402
from distflow.data.sources import load_rows  # noqa: E402
from distflow.environments.verifiers_episode import play  # noqa: E402
from distflow.errors import UserError  # noqa: E402
from tests.environments.test_endpoint import CALLS  # noqa: E402
from tests.environments.test_training import Games  # noqa: E402

pytestmark = pytest.mark.slow

TASKSET = '''
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


class Sum(vf.Task[Data]):
    {task}
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward
    async def turns(self, trace) -> float:
        return trace.num_turns / 10


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Sum(Data(idx=i, prompt=f"{{i}}+1=", answer=str(i + 1)), self.config.task)


{environment}

if __name__ == "__main__":
    Adder.run()
'''
GUESSES = """
class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    {more}


class Guesses(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as chat:
            reply = await chat.turn()
            while not reply.terminated and reply.last_reply.strip() != task.data.answer:
                {fault}
                reply = await chat.turn("no:")


__all__ = ["Sums", "Guesses"]
"""
TOOLS = "toolsets = classmethod(lambda cls, config: [Adder(vf.ToolsetConfig())])"


@pytest.fixture
def row(tmp_path, monkeypatch):
    """The row of the task 1+1=, of a taskset of this test alone."""

    def make(task: str = "", environment: str = "__all__ = ['Sums']") -> dict[str, Any]:
        name = f"toy_{abs(hash(str(tmp_path)))}"
        (tmp_path / f"{name}.py").write_text(TASKSET.format(task=task, environment=environment))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes of tools
        rows, *_ = load_rows(f"verifiers:{name}", Columns(answer_required=False))
        return {**(rows[1].extra_info or {}), "name": name}

    return make


def guesses(more: str = "", fault: str = "") -> str:
    return GUESSES.format(more=more or "pass", fault=fault or "pass")


def played(episode: Any, row: dict[str, Any], **env: Any) -> Any:
    return asyncio.run(
        play(row, f"{episode.session.base_url}/v1", episode.session.key, "policy", env)
    )


def test_turns_are_the_environments_and_tokens_exact(begin, row):
    episode = begin("7", " 3", "2")
    assert played(episode, row(environment=guesses())) == {"score": 2.3, "right": 1.0, "turns": 0.3}
    episode.check_exact()
    assert [segment.owner for segment in episode.chat.segments] == [
        *("prompt", "policy", "environment", "policy", "environment", "policy")
    ]


def test_tools_of_a_task_are_called(begin, row):
    name = f"{CALLS}".replace('"add"', '"adder_add"')
    episode = begin(f"Let me see. {name}", "2")
    found = played(episode, row(task=TOOLS))
    assert found == {"score": 2.2, "right": 1.0, "turns": 0.2}
    assert (
        episode.chat.messages[-2]["role"] == "tool" and "2" in episode.chat.messages[-2]["content"]
    )


def test_what_fails_is_an_error_and_no_reward_of_0(begin, row):
    with pytest.raises(RuntimeError, match="ValueError: the game"):
        played(begin("7"), row(environment=guesses(fault="raise ValueError('the game is lost')")))
    with pytest.raises(UserError, match="must be verifiers:ID"):
        played(begin(), {})


@pytest.mark.parametrize(
    "more, env, said",
    [
        ("other: vf.AgentConfig = vf.AgentConfig()", {}, "several agents \\(player, other\\)"),
        ("", {"playr": {}}, "playr"),
        ("", {"player": {"max_turns": "x"}}, "max_turns"),
        ("", {"player": {"harness": {"id": "nowhere"}}}, "nowhere"),
    ],
)
def test_what_cannot_be_played_is_told(begin, row, more, env, said):
    with pytest.raises(UserError, match=said):
        played(begin(), row(environment=guesses(more)), **env)


def test_a_run_trains_on_them(row, tmp_path, monkeypatch):
    """Episodes run in processes of their own, two turns each at most by the config of the agent's
    seat."""
    name = row(environment=guesses())["name"]
    games = Games(tmp_path)
    env = "{player: {max_turns: 2, sampling: {max_tokens: 4}}}"
    found = games.run(
        "grpo",
        f"data.train_files=verifiers:{name}",
        "actor_rollout_ref.rollout.workflow=verifiers",
        f"actor_rollout_ref.rollout.workflow_kwargs={{env: {env}}}",
        "data.max_prompt_length=32",
        "data.max_response_length=64",
        "reward.timeout_s=120",
        "trainer.total_training_steps=2",
    )
    assert [step["reward/error_rate"] for step in found.metrics()] == [0.0] * len(found.metrics())
    assert found.notes("end") == ["the run finished"]
