"""Faults planted where an episode is said, told, paid and scored, and in what a judge keeps: the
audit names each."""

import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distflow.environments import (
    builtin_workflows,
    environment_workflow,
    parse_tool_calls,
    workflows,
)
from distflow.environments.chat import Chat
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.environments.user_code_process import UserProcess
from distflow.errors import TrustError
from distflow.pipelines.nodes import rollout_reward_filter, workflow_rollout
from distflow.rewards.router import RewardRouter
from distflow.scheduling.curriculum_and_difficulty_filter import Skips
from tests.e2e.runs import REWARD, Playground
from tests.environments.test_tools_of_a_workflow import Callers
from tests.environments.test_training import Games, saved
from tests.rewards.test_judge_reward import reward_result
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
        match=r"step 1 found \(rewards\): token_level_scores of sample 0-0 is .* at token 3",
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
    batch = saved(run_chats(ground, "talk", "trainer.save_groups=all", "trust.audit_freq=1"))
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
def test_a_judges_answer_about_another_response(server: Any, tmp_path: Path) -> None:
    server.reply = lambda content, number: reward_result(sum(map(ord, content)) % 11 / 10)
    store = tmp_path / "store"
    ground = Games(tmp_path, num_rows=4)
    options = (
        f"{{model: m, base_url: '{server.url}', store: '{store}', template: '{{ground_truth}} "
        f"{{response}}'}}"
    )
    judged = (
        "grpo",
        f"reward.functions={{default: [{{name: judge, options: {options}}}]}}",
        *SHORT,
    )
    run = ground.run(*judged, name="first")
    assert "judge_answers" in run.audits()[0]["proven"] and not run.notes("warning")
    with closing(sqlite3.connect(store)) as connection, connection:
        keys = [key for (key,) in connection.execute("SELECT key FROM answers ORDER BY key")]
        connection.execute("UPDATE answers SET key = 'x' || key")
        for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
            connection.execute("UPDATE answers SET key = ? WHERE key = 'x' || ?", (other, key))
    with pytest.raises(
        TrustError, match=r"found \(judge_answers\): sample .* has the judge's score"
    ):
        ground.run(*judged, name="again")


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_rows_that_are_skipped(tmp_path: Path, monkeypatch: Patch, is_wrong: bool) -> None:
    ground = Playground(tmp_path)
    ground.write_reward(REWARD.replace("% 7 / 6", "% 2"))
    record = Skips.record
    if is_wrong:  # the row before it is skipped
        monkeypatch.setattr(
            Skips,
            "record",
            lambda self, domain, row, accuracy: record(self, domain, row + 1, accuracy),
        )
    with pytest.raises(TrustError, match=r"found \(skipped_rows\)") if is_wrong else nullcontext():
        run = ground.run("grpo", "data.skip_outside=[0.3,0.7]", "trainer.total_training_steps=6")
        assert run.metrics()[-1]["async/rejected"] > 0 and not run.notes("warning")


@pytest.mark.slow
def test_a_checker_that_is_paid_for_an_error(tmp_path: Path, monkeypatch: Patch) -> None:
    playground = Playground(tmp_path)
    original = workflow_rollout._Episodes._by_agent
    keys = (
        "data.max_response_length=40",
        "data.max_prompt_length=100",
        "trainer.total_training_steps=1",
    )
    assert playground.run("multi_agent", *keys, name="healthy").notes("error") == []

    def planted(self: Any, chat: Any, returned: Any) -> Any:
        return original(self, chat, {**returned, "checker": 1.0 - returned["checker"]})

    monkeypatch.setattr(workflow_rollout._Episodes, "_by_agent", planted)
    with pytest.raises(TrustError, match=r"\(episodes\): the checker of sample \S+ earned"):
        playground.run("multi_agent", *keys, name="planted")


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


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_validation_episodes_that_end_after_a_turn(
    tmp_path: Path, monkeypatch: Patch, is_planted: bool
) -> None:
    playground = Playground(tmp_path)
    original = Chat.ask

    async def ask(self: Chat, said: Any, **options: Any) -> Any:
        if is_planted and not self.sampling and self.turns:
            return replace(self.last, token_ids=())  # the workflow ends at an empty reply
        return await original(self, said, **options)

    monkeypatch.setattr(Chat, "ask", ask)
    (tmp_path / "val.jsonl").write_text(
        "".join(f'{{"prompt": "cd{n}=", "answer": "7"}}\n' for n in range(8))
    )
    keys = (
        f"{WORKFLOW}=multi_turn",
        "actor_rollout_ref.rollout.stop=['1','a','e','o','t']",
        "trainer.test_freq=1",
    )
    val = (f"data.val_files={tmp_path}/val.jsonl", *SHORT)
    says = r"\(validation\): sample 0 of row \d+ of .* counts as ended by itself after 1 turns"
    with pytest.raises(TrustError, match=says) if is_planted else nullcontext():
        playground.run("grpo", *keys, *val)


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
def test_a_domain_with_the_workflow_of_another(
    tmp_path: Path, monkeypatch: Patch, is_planted: bool
) -> None:
    original = builtin_workflows.ByDomain.__call__

    async def planted(self: Any, chat: Any, row: Any, reward_fn: Any = None) -> Any:
        return await original(
            self, chat, replace(row, domain="other") if is_planted else row, reward_fn
        )

    monkeypatch.setattr(builtin_workflows.ByDomain, "__call__", planted)
    playground = Playground(tmp_path)
    playground.write_rows(
        [{"prompt": f"{i}:", "answer": "7", "domain": "ab"[i % 2]} for i in range(12)]
    )
    flows = "{a: single_turn, default: {workflow: multi_turn, max_turns: 2, feedback: 'no'}}"
    keys = (f"{WORKFLOW}=by_domain", f"{WORKFLOW}_kwargs={flows}", "data.domain_key=domain")
    stop = "actor_rollout_ref.rollout.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p]"
    with (
        pytest.raises(
            TrustError, match=r"\(episodes\): sample \S+ ended \(\w+\) after 2 of 1 turns"
        )
        if is_planted
        else nullcontext()
    ):
        playground.run("grpo", *keys, stop, *SHORT)


@pytest.mark.slow
def test_a_call_of_a_tool_that_is_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    find = parse_tool_calls.find_tool_calls
    monkeypatch.setattr(
        "distflow.environments.tool_workflow.find_tool_calls",
        lambda *arguments: find(*arguments)[:1],
    )
    keys = (
        f"actor_rollout_ref.model.path={tmp_path}/caller",
        "actor_rollout_ref.model.init=random",
    )
    tools = f"{WORKFLOW}_kwargs={{tools: [calculator], max_turns: 3, format: hermes}}"
    more = ("data.max_response_length=160", "data.max_prompt_length=32", f"{WORKFLOW}=tools")
    with pytest.raises(
        TrustError,
        match=r"\(episodes\): a reply has \d calls of tools in sample \S+, but 1 of them",
    ):
        Callers(tmp_path).run("grpo", *CHAT, *keys, tools, *more)


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [True, False])
def test_episodes_that_are_truncated_too_early(
    tmp_path: Path, monkeypatch: Patch, is_planted: bool
) -> None:
    room = Chat.response_left.fget
    monkeypatch.setattr(Chat, "response_left", property(lambda chat: room(chat) - 7 * is_planted))  # type: ignore[misc]
    says = r"\(episodes\): sample \S+ counts as truncated, but 7 more tokens fit into its response"
    with pytest.raises(TrustError, match=says) if is_planted else nullcontext():
        Playground(tmp_path).run("grpo", f"{WORKFLOW}=multi_turn", *SHORT)


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
