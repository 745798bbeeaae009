"""Faults planted where an episode is said, told, paid and scored: the checks name each."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.environments import (
    environment_workflow,
    workflows,
)
from distflow.environments.chat import Chat
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.user_code_process import UserProcess
from distflow.errors import TrustError
from distflow.pipelines.nodes import rollout_reward_filter, workflow_rollout
from distflow.rewards.router import RewardRouter
from tests.e2e.runs import Playground
from tests.environments.test_tools_of_a_workflow import Callers
from tests.environments.test_training import Games, saved
from tests.rewards.test_judge_reward import server as server

Patch = pytest.MonkeyPatch
WORKFLOW = "actor_rollout_ref.rollout.workflow"
SHORT = (
    "data.max_response_length=90",
    "data.max_prompt_length=40",
    "trainer.total_training_steps=2",
)
CHAT = ("data.prompt_format=chat", *SHORT)
PAID = """
async def paid(chat, row):
    reply = await chat.ask(row.prompt, max_tokens=4)
    chat.reward(1.0)
    reply = await chat.ask(f"=?{len(reply.text)}", max_tokens=4)
    chat.reward(0.5)
    other = await chat.fork().ask("!", max_tokens=3)
    return 2.0 + sum(map(ord, other.text)) % 5

async def talk(chat, row):
    for said in (row.prompt, "no", "so", "then"):
        reply = await chat.ask(said, max_tokens=6)
    return sum(map(ord, reply.text)) % 5

async def scored(chat, row, reward_fn):
    first = await chat.ask(row.prompt, max_tokens=4)
    await chat.ask("=?", max_tokens=4)
    return await reward_fn(first)
"""
GAME = '''
class Game:
    """Every observation is another, and each action is paid."""

    def reset(self, *, seed=None, options=None):
        self.seed, self.turns = seed, 0
        return f"s{seed}=", {}

    def step(self, action):
        self.turns += 1
        return f"o{self.turns}{self.seed}=", sum(map(ord, action)) % 7 / 6 + self.turns, self.turns == 2, False, {}
'''  # noqa: E501


@pytest.fixture
def ground(tmp_path: Path) -> Games:
    ground = Games(tmp_path)
    (tmp_path / "flows.py").write_text(PAID)
    (tmp_path / "game.py").write_text(GAME)
    return ground


def run_chats(ground: Games, flow: str = "paid", *more: str) -> Any:
    ground.write_rows(
        [{"prompt": [{"role": "user", "content": f"{i}:"}], "answer": "7"} for i in range(12)]
    )
    return ground.run("grpo", f"{WORKFLOW}={ground.folder}/flows.py:{flow}", *CHAT, *more)


def run_games(ground: Games) -> Any:
    ground.write_rows([{"prompt": f"{i}:", "seed": 3 * i} for i in range(12)])
    stop = "actor_rollout_ref.rollout.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p]"
    game = f"{WORKFLOW}_kwargs={{env: '{ground.folder}/game.py:Game'}}"
    return ground.run("grpo", f"{WORKFLOW}=environment", game, stop, *SHORT)


def wrapped(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """`change` makes the planted function of the real one."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def paid_in_reverse(patch: Patch) -> None:
    earned = rollout_reward_filter._earned
    patch.setattr(rollout_reward_filter, "_earned", lambda sample: earned(sample)[::-1])


def test_rewards_of_turns_that_change_places(ground: Games, monkeypatch: Patch) -> None:
    paid_in_reverse(monkeypatch)
    with pytest.raises(
        TrustError,
        match=r"step 1 found \(episodes\): token_level_scores of sample .* at token 3",
    ):
        run_chats(ground)


def step_with(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """The answer of an environment's step, changed behind the border of its process."""

    def made(call: Any) -> Any:
        async def planted(
            self: UserProcess, method: str, timeout_s: float | None, **arguments: Any
        ) -> Any:
            answer = await call(self, method, timeout_s, **arguments)
            return change(answer) if method == "step" else answer

        return planted

    return wrapped(UserProcess, "call", made)


GAMES = {
    "a reward is halved": (
        step_with(lambda step: [step[0], step[1] / 2, step[2]]),
        "returned the rewards",
    ),
    "an observation is cut": (
        step_with(lambda step: [step[0][1:], *step[1:]]),
        "but the policy was told",
    ),
    "the end is missed": (
        step_with(lambda step: [*step[:2], False]),
        "with|continues after its end",
    ),
    "another seed": (
        wrapped(environment_workflow, "seed_of", lambda of: lambda row: of(row) + 1),
        "was reset with .* but its row has",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_what_an_environment_returned_and_was_given(
    ground: Games, monkeypatch: Patch, name: str
) -> None:
    plant, said = GAMES[name]
    plant(monkeypatch)
    with pytest.raises(TrustError, match=rf"found \(episodes\): .*(?:{said})"):
        run_games(ground)


@pytest.mark.slow
def test_tokens_between_turns(ground: Games, monkeypatch: Patch) -> None:
    """The prompt for the reply is missing."""
    render = TurnTokens._render
    monkeypatch.setattr(
        TurnTokens,
        "_render",
        lambda self, m, tools=(), prompts=True: render(self, m, tools, prompts=False),
    )
    with pytest.raises(
        TrustError,
        match=r"found \(episodes\): the tokens before token .* of what its workflow said",
    ):
        run_chats(ground)


@pytest.mark.slow
def test_a_template_that_ends_a_turn_where_the_next_begins(ground: Games) -> None:
    turns = "{% for m in messages %}{{ '<eos>' + m.role + ':' + m.content }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ '<eos>a:' }}{% endif %}"
    (ground.folder / "model" / "chat_template.jinja").write_text(turns + prompt)
    batch = saved(run_chats(ground, "talk", "trainer.save_groups=all", "trust.check_freq=1"))
    ids = batch["response_ids"]
    is_end = (batch["response_ids"] == 2) & (batch["response_mask"] > 0)
    assert is_end[:, :-1].any() and not (is_end[:, :-1] & (ids[:, 1:] == 2)).any()


@pytest.mark.slow
def test_a_text_that_is_cut_before_it_is_scored(tmp_path: Path, monkeypatch: Patch) -> None:
    call = RewardRouter.__call__

    async def planted(self: RewardRouter, samples: Any) -> Any:
        return await call(
            self, [replace(sample, response=sample.response[1:]) for sample in samples]
        )

    monkeypatch.setattr(RewardRouter, "__call__", planted)
    (tmp_path / "flows.py").write_text(PAID)
    with pytest.raises(TrustError, match=r"found \(episodes\): the text .* was (passed|scored)"):
        run_chats(Playground(tmp_path), "scored")


@pytest.mark.slow
def test_replies_with_more_tokens_than_were_asked_for(tmp_path: Path, monkeypatch: Patch) -> None:
    playground = Playground(tmp_path)
    original = workflow_rollout.EpisodeRequests.ask
    (tmp_path / "flows.py").write_text(PAID)

    async def planted(self: Any, index: int, fork: str, prompt: Any, most: int, *more: Any) -> Any:
        return await original(self, index, fork, prompt, most + 1, *more)

    monkeypatch.setattr(workflow_rollout.EpisodeRequests, "ask", planted)
    with pytest.raises(
        TrustError,
        match=r"\(episodes\): a reply of sample \S+ has 5 tokens, but the workflow asked",
    ):
        playground.run("grpo", f"{WORKFLOW}={tmp_path}/flows.py:scored", *SHORT)


def swapped(texts: list[str], kept: list[str]) -> list[str]:
    return texts[::-1]


def of_before(texts: list[str], kept: list[str]) -> list[str]:
    kept[:] = kept or texts[:1]
    return [*kept, *texts[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("plant", [swapped, of_before, None])
def test_answers_of_other_tool_calls(tmp_path: Path, monkeypatch: Patch, plant: Any) -> None:
    original, kept = Chat.ask, dict[int, list[str]]()

    async def ask(self: Chat, said: Any, **options: Any) -> Any:
        if plant is not None and isinstance(said, list) and said[0]["role"] == "tool":
            texts = plant([each["content"] for each in said], kept.setdefault(id(self), []))
            said = [{**each, "content": text} for each, text in zip(said, texts, strict=True)]
        return await original(self, said, **options)

    monkeypatch.setattr(Chat, "ask", ask)
    keys = (
        f"actor_rollout_ref.model.path={tmp_path}/caller",
        "actor_rollout_ref.model.init=random",
        f"{WORKFLOW}=tools",
    )
    tools = f"{WORKFLOW}_kwargs={{tools: [calculator], max_turns: 3, format: hermes}}"
    more = ("data.max_response_length=160", "data.max_prompt_length=32", f"{WORKFLOW}=tools")
    with (
        pytest.raises(
            TrustError, match=r"\(episodes\): a call of tool .* was answered .* in sample"
        )
        if plant
        else nullcontext()
    ):
        Callers(tmp_path).run("grpo", *CHAT, *keys, tools, *more)


STOPPED = """
async def stopped(chat, row, reward_fn):
    await chat.ask(row.prompt, max_tokens=6, stop=list("abcdefghijklmnopqrstuvwxyz"))
    return await reward_fn(await chat.ask("=?", max_tokens=4))
"""


def without_stops(patch: Patch) -> None:
    original = workflow_rollout.EpisodeRequests.ask

    async def planted(
        self: Any, index: int, fork: str, prompt: Any, most: int, stop: Any, *more: Any
    ) -> Any:
        return await original(self, index, fork, prompt, most, (), *more)

    patch.setattr(workflow_rollout.EpisodeRequests, "ask", planted)


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_stops_of_a_call_that_are_lost(
    tmp_path: Path, monkeypatch: Patch, is_planted: bool
) -> None:
    playground = Playground(tmp_path)
    (tmp_path / "flows.py").write_text(STOPPED)
    if is_planted:
        without_stops(monkeypatch)
    says = r"\(episodes\): a reply of sample \S+ goes on after '.', which should end it"
    with pytest.raises(TrustError, match=says) if is_planted else nullcontext():
        playground.run("grpo", f"{WORKFLOW}={tmp_path}/flows.py:stopped", *SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"system_prompt": "s:"},
            r"the agent 'checker' of sample \S+ began with .*'s:'.*, but by its settings with",
        ),
        (
            {"max_tokens": None},
            r"a reply of sample \S+ has \d+ tokens, but the workflow asked for at most 3, or its",
        ),
        ({}, ""),
    ],
)
def test_settings_of_another_agent(
    tmp_path: Path, monkeypatch: Patch, change: dict[str, Any], says: str
) -> None:
    begin_agents = workflows.begin_agents

    def planted(chat: Any, agents: Any) -> Any:
        return begin_agents(chat, {name: replace(each, **change) for name, each in agents.items()})

    monkeypatch.setattr(workflows, "begin_agents", planted)
    checker = "{policy: checker, system_prompt: 'c:', max_tokens: 3}"
    agents = (
        f"actor_rollout_ref.rollout.agents={{solver: {{system_prompt: 's:'}}, checker: {checker}}}"
    )
    keys = (agents, "data.max_prompt_length=100")
    with pytest.raises(TrustError, match=rf"\(episodes\): {says}") if change else nullcontext():
        Playground(tmp_path).run("multi_agent", *keys, *SHORT[::2])


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_an_agent_that_earns_another_score(
    tmp_path: Path, monkeypatch: Patch, is_planted: bool
) -> None:
    reward = Chat.reward
    monkeypatch.setattr(
        Chat,
        "reward",
        lambda chat, value: reward(chat, value + is_planted * (chat.agent == "solver")),
    )
    says = r"\(rewards\): agent \w+ earned \S+ in sample \S+, but its workflow returned"
    with pytest.raises(TrustError, match=says) if is_planted else nullcontext():
        Playground(tmp_path).run("multi_agent", "data.max_prompt_length=100", *SHORT[::2])
