"""Faults planted where an episode is said, told, paid and scored: the checks name each."""

from dataclasses import replace
from typing import Any

import pytest

from distflow.environments.tokens_between_turns import TurnTokens
from distflow.errors import TrustError
from distflow.pipelines.nodes import turn_rewards
from distflow.rewards.router import RewardRouter
from tests.e2e.runs import Playground
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


@pytest.fixture
def ground(tmp_path):
    ground = Games(tmp_path)
    (tmp_path / "flows.py").write_text(PAID)
    return ground


def run_chats(ground: Games, flow: str = "paid", *more: str) -> Any:
    ground.write_rows(
        [{"prompt": [{"role": "user", "content": f"{i}:"}], "answer": "7"} for i in range(12)]
    )
    return ground.run("grpo", f"{WORKFLOW}={ground.folder}/flows.py:{flow}", *CHAT, *more)


def paid_in_reverse(patch: Patch) -> None:
    earned = turn_rewards._earned
    patch.setattr(turn_rewards, "_earned", lambda sample: earned(sample)[::-1])


def test_rewards_of_turns_that_change_places(ground, monkeypatch):
    paid_in_reverse(monkeypatch)
    with pytest.raises(
        TrustError,
        match=r"step 1 .*\(episodes\): token_level_scores .* at token 3",
    ):
        run_chats(ground)


@pytest.mark.slow
def test_tokens_between_turns(ground, monkeypatch):
    """The first letter of what is said is missing."""
    render = TurnTokens._render

    def planted(self: TurnTokens, messages: Any, *more: Any, **options: Any) -> str:
        cut = [{**each, "content": str(each["content"]).replace("=?", "?")} for each in messages]
        return render(self, cut, *more, **options)

    monkeypatch.setattr(TurnTokens, "_render", planted)
    with pytest.raises(TrustError, match=r"\(episodes\): the tokens before token \d+ "):
        run_chats(ground)


@pytest.mark.slow
def test_a_template_that_ends_a_turn_where_the_next_begins(ground):
    turns = "{% for m in messages %}{{ '<eos>' + m.role + ':' + m.content }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ '<eos>a:' }}{% endif %}"
    (ground.folder / "model" / "chat_template.jinja").write_text(turns + prompt)
    batch = saved(run_chats(ground, "talk", "trainer.save_groups=all", "trust.check_freq=1"))
    ids = batch["response_ids"]
    is_end = (batch["response_ids"] == 2) & (batch["response_mask"] > 0)
    assert is_end[:, :-1].any() and not (is_end[:, :-1] & (ids[:, 1:] == 2)).any()


@pytest.mark.slow
def test_a_text_that_is_cut_before_it_is_scored(tmp_path, monkeypatch):
    call = RewardRouter.__call__

    async def planted(self: RewardRouter, samples: Any) -> Any:
        return await call(
            self, [replace(sample, response=sample.response[1:]) for sample in samples]
        )

    monkeypatch.setattr(RewardRouter, "__call__", planted)
    (tmp_path / "flows.py").write_text(PAID)
    with pytest.raises(TrustError, match=r"\(episodes\): the text .*(passed|scored)"):
        run_chats(Playground(tmp_path), "scored")
