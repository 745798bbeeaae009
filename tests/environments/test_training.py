"""Whole runs with a workflow: a game of several turns trains, and the checks follow every
request."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from distflow.errors import TrustError, UserError
from distflow.rewards.router import RewardRouter
from tests.e2e.runs import Playground

pytestmark = pytest.mark.slow

GAME = """
from distflow import workflow

@workflow
async def echo(chat, row, *, rounds: int = 2):
    reply = await chat.ask(row.prompt, max_tokens=3)
    while chat.turns < rounds:
        reply = await chat.ask("=?", max_tokens=3)
    return {"length": len(reply.text) / 4, "letters": sum(map(ord, reply.text)) % 7 / 6}
"""
FAULTY = """
import random

async def faulty(chat, row):
    chance = random.random()
    if chance < 0.1:
        raise RuntimeError("before a token")
    reply = await chat.ask(row.prompt)
    if chance < 0.2:
        return "seven"
    if chance < 0.3:
        return None
    return len(reply.text)

class Twice:
    def __init__(self, *, question="=?", extra):
        self.question = question

    async def __call__(self, chat, row, reward_fn):
        await chat.ask(row.prompt, max_tokens=2)
        reply = await chat.ask(self.question)
        rewarded = await reward_fn()
        assert rewarded.reward_result == (await reward_fn(reply)).reward_result
        return rewarded
"""
OWN = """
from distflow.pipelines.grpo import grpo_pipeline

def own():
    return grpo_pipeline()
"""
WORKFLOW = "actor_rollout_ref.rollout.workflow"


class Games(Playground):
    """Runs without reward functions."""

    def overrides(self, name: str, *more: str) -> list[str]:
        return [
            line for line in super().overrides(name) if "reward" not in line.partition("=")[0]
        ] + list(more)


@pytest.fixture
def playground(tmp_path):
    playground = Games(tmp_path)
    (tmp_path / "game.py").write_text(GAME + FAULTY)
    return playground


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_game_of_two_turns_trains_and_every_check_passes(playground, max_staleness):
    run = playground.run(
        "grpo",
        f"{WORKFLOW}={playground.folder}/game.py:echo",
        "trainer.total_training_steps=4",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        f"async.max_staleness={max_staleness}",
    )
    assert not run.notes("warning")
    found = run.checks()
    assert len(found) == 4

    for step in found:
        assert {"turns", "masks", "versions", "draws", "loss", "advantages"} <= {*step["passed"]}
        assert {"rewards"} <= {*step["passed"]} and not step["not_checked"]

    for path in sorted((run.folder / "tokens").glob("*.safetensors")):
        batch = Batch.load(path)
        for mask, trained in zip(batch["response_mask"], batch["loss_mask"], strict=True):
            edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            assert len(edges) == 4 and edges[0] == 0 and edges[2] - edges[1] == 2, (
                "two turns, given tokens between"
            )
            assert torch.equal(mask, trained)


OF_AREAL = """
from transformers import AutoTokenizer
from tests.environments.areal_user import GenerationHyperparameters, MultiTurnWorkflow, reward

tokenizer = AutoTokenizer.from_pretrained({model!r})
gconfig = GenerationHyperparameters(max_new_tokens=4, stop_token_ids=[tokenizer.eos_token_id, 9])
workflow = MultiTurnWorkflow(reward, gconfig, tokenizer, max_turns=3, turn_discount=0.5, feedback=[5, 6])
"""  # noqa: E501


def test_a_workflow_of_areal_trains_as_it_stands_and_every_check_passes(playground):
    (playground.folder / "of_areal.py").write_text(
        OF_AREAL.format(model=f"{playground.folder}/model")
    )
    run = playground.run(
        "grpo",
        f"{WORKFLOW}={playground.folder}/of_areal.py:workflow",
        "data.max_response_length=30",
        "trainer.total_training_steps=4",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        "async.max_staleness=2",
        "data.val_files=${data.train_files}",
        "data.allow_overlap=true",
        "trainer.val_before_train=true",
    )
    assert not run.notes("warning")
    found = run.checks()
    (validation,) = [step for step in found if "validation" in step["passed"]]
    found.remove(validation)
    assert len(found) == 4 and all("turns" in step["passed"] for step in found)
    batch = saved(run)

    seen = set[float]()
    for mask, ids, score in zip(
        batch["response_mask"], batch["response_ids"], batch["scores"].tolist(), strict=True
    ):
        turns = [[]]  # type: list[list[int]]
        for token, drawn in zip(ids.tolist(), mask.tolist(), strict=True):
            turns = (
                [*turns[:-1], [*turns[-1], token]]
                if drawn
                else [*turns, []]
                if turns[-1]
                else turns
            )

        drawn_turns = [turn for turn in turns if turn]
        assert score == (sum(drawn_turns[-1]) % 3 == 0) * 0.5 ** (len(drawn_turns) - 1)
        seen.add(score)

    assert seen == {0.0, 0.25, 0.5, 1.0}


PAID = """
async def paid(chat, row):
    reply, total = await chat.ask(row.prompt, max_tokens=3), 0.0
    while True:
        earned = sum(reply.token_ids) % 5 / 4
        chat.reward(earned)
        total += earned
        if chat.turns == 3 or sum(reply.token_ids) % 3 == 0:
            return total + 1.0
        reply = await chat.ask("=?", max_tokens=3)
"""


@pytest.mark.parametrize(
    ("preset", "keys"),
    [
        ("grpo", ["adv_estimator=grpo_turns", "adv_estimator_kwargs={turn_discount: 0.5}"]),
        ("ppo", ["adv_estimator_kwargs={over_turns: true}", "gamma=0.9"]),
    ],
)
def test_turns_have_rewards_of_their_own(playground, preset, keys):
    """The advantages of turns."""
    (playground.folder / "paid.py").write_text(PAID)
    more = [f"critic.model.path={playground.folder}/model"] if preset == "ppo" else []
    run = playground.run(
        preset,
        f"{WORKFLOW}={playground.folder}/paid.py:paid",
        "data.max_response_length=20",
        "trainer.total_training_steps=2",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        *(f"algorithm.{key}" for key in keys),
        *more,
    )
    found = run.checks()
    assert len(found) == 2 and all({"advantages", "turns"} <= {*step["passed"]} for step in found)
    batch = saved(run)

    lengths = set[int]()
    for i, score in enumerate(batch["scores"].tolist()):
        length = int(batch.lengths("response")[i])
        index, ids, placed = (
            batch[name][i, :length].tolist()
            for name in ("turn_index", "response_ids", "token_level_scores")
        )

        wanted = [0.0] * length
        for turn in range(max(index) + 1):
            places = [place for place, number in enumerate(index) if number == turn]
            wanted[places[-1]] = sum(ids[place] for place in places) % 5 / 4 + (turn == max(index))
            assert len({float(batch["advantages"][i, place]) for place in places}) == 1

        assert placed == pytest.approx(wanted) and score == pytest.approx(sum(wanted))
        assert [number >= 0 for number in index] == [
            bool(drawn) for drawn in batch["response_mask"][i, :length]
        ]
        lengths.add(max(index) + 1)

    assert lengths == {1, 2, 3}


DIGITS = """
class Digits:
    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return "?", {}

    def step(self, action):
        self.turns += 1
        return "again", float(sum(map(ord, action)) % 3), self.turns == 2, False, {}
"""


def test_each_domain_has_its_own_workflow_and_estimator(tmp_path):
    playground = Playground(tmp_path)
    (tmp_path / "digits.py").write_text(DIGITS)

    domains = {
        name: f"{name}: {{train_files: {tmp_path}/{name}.jsonl}}" for name in ("sums", "games")
    }
    for name in domains:
        rows = [{"prompt": f"{name[0]}{i}=", "answer": "7"} for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    env = f"{{workflow: environment, env: '{tmp_path}/digits.py:Digits', max_turns: 2}}"
    run = playground.run(
        "grpo",
        "data.train_files=[]",
        f"data.domains={{{', '.join(domains.values())}}}",
        f"{WORKFLOW}=by_domain",
        f"{WORKFLOW}_kwargs={{games: {env}, default: single_turn}}",
        (
            "algorithm.domains={games: {adv_estimator: grpo_turns, policy_loss: sapo, "
            "policy_loss_kwargs: {tau_neg: 2}}}"
        ),
        "actor_rollout_ref.actor.ppo_epochs=2",
        "data.max_response_length=40",
        "trainer.total_training_steps=2",
        "trainer.save_groups=all",
        "trust.check_freq=1",
    )
    assert not run.notes("warning") and len(run.checks()) == 2
    assert all(
        {"turns", "episodes", "rewards", "advantages", "loss"} <= {*step["passed"]}
        for step in run.checks()
    )
    shares = [
        {key: each[f"actor/{key}"] for key in ("pg_loss", "pg_loss/games")}
        for each in run.metrics()
    ]
    assert all(0 != share["pg_loss/games"] != share["pg_loss"] for share in shares)
    batch = saved(run)
    assert {*batch["domain"]} == {"sums", "games"}

    for row, domain in enumerate(batch["domain"]):
        turns = batch["turn_index"][row].unique().tolist()
        own = batch["advantages"][row][batch["response_mask"][row] > 0].unique()

        if domain == "sums":
            assert [turn for turn in turns if turn >= 0] == [0] and len(own) == 1
            assert float(batch["scores"][row]) == pytest.approx(
                sum(map(ord, batch["responses"][row])) % 7 / 6
            )
        elif batch["finish_reason"][row] == "stop":
            assert [turn for turn in turns if turn >= 0] == [0, 1] and float(
                batch["scores"][row]
            ) in range(5)


def saved(run: Any) -> Batch:
    return Batch.concat(
        [Batch.load(path) for path in sorted((run.folder / "tokens").glob("*.safetensors"))]
    )


def test_errors_and_rejected_episodes_are_left_out_and_told_apart(playground):
    """Of 48 episodes a tenth each raises before a token, returns a text, or is rejected."""
    run = playground.run(
        "grpo",
        f"{WORKFLOW}={playground.folder}/game.py:faulty",
        "trainer.total_training_steps=3",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        "reward.max_error_rate=1",
    )
    batch = saved(run)
    errors = batch["reward_errors"]
    kinds = {
        "raised": [
            error is not None and "RuntimeError: before a token (at " in error for error in errors
        ],
        "text": [
            error is not None and "it returned 'seven', which is not a number" in error
            for error in errors
        ],
    }
    rejected = [
        not valid and error is None for valid, error in zip(batch["valid"], errors, strict=True)
    ]
    assert any(kinds["raised"]) and any(kinds["text"]) and any(rejected)
    lengths = batch.lengths("response")

    for i in range(len(batch)):
        wrong = kinds["raised"][i] or kinds["text"][i] or rejected[i]
        assert bool(batch["valid"][i]) != wrong and (not wrong or not batch["loss_mask"][i].any())
        assert (int(lengths[i]) == 0) == kinds["raised"][i]

    told = sum(row["episodes/rejected"] * 16 for row in run.metrics())
    assert round(told) >= sum(rejected)
    (warning,) = [note for note in run.notes("warning") if "reward errors" in note][:1]
    assert "workflow faulty: " in warning


def test_a_class_is_made_with_its_options_and_calls_reward_functions(tmp_path):
    playground = Playground(tmp_path)
    (tmp_path / "game.py").write_text(FAULTY)
    run = playground.run(
        "grpo",
        f"{WORKFLOW}={tmp_path}/game.py:Twice",
        f"{WORKFLOW}_kwargs={{question: ab, extra: 1}}",
        "trainer.total_training_steps=1",
        "trainer.save_groups=all",
        "trust.check_freq=1",
    )
    batch = saved(run)
    for text, score in zip(batch["responses"], batch["scores"].tolist(), strict=True):
        assert score == pytest.approx(sum(map(ord, text)) % 7 / 6)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["=nobody"], "no built-in workflow has that name"),
        (["=game.py:nobody"], "has no 'nobody'"),
        (["=game.py:GAME"], "has no 'GAME'"),
        (
            ["=game.py:echo", "_kwargs={round: 2}"],
            r"workflow_kwargs: .*'round'; .*rounds",
        ),
        (["=game.py:Twice"], "missing .*'extra'"),
        (
            ["=game.py:echo", "reward.functions={default: [format]}"],
            "keys without effect.*reward.functions",
        ),
        (
            ["=game.py:echo", "algorithm.adv_estimator=remax"],
            "one greedy response, which is not an episode",
        ),
        (["=game.py:echo", "dag.pipeline=nodes.py:own"], "keys without effect.*rollout.workflow "),
        (["_kwargs={rounds: 2}"], "keys without effect|workflow_kwargs"),
    ],
)
def test_a_workflow_that_cannot_run_is_refused_at_the_start(playground, lines, said):
    folder = str(playground.folder)
    (playground.folder / "nodes.py").write_text(OWN)
    keys = [
        line.replace("nodes.py", f"{folder}/nodes.py")
        if line[0] not in "=_"
        else f"{WORKFLOW}{line}".replace("=game.py", f"={folder}/game.py")
        for line in lines
    ]
    with pytest.raises(UserError, match=f"(?s){said}"):
        playground.spec("grpo", *keys)


def test_multi_turn_gives_feedback_until_the_answer_is_right(tmp_path):
    """Scores of the run's reward function, discounted by turn; accuracies are of the last
    answer."""
    playground = Playground(tmp_path)
    playground.write_reward(REWARDED)
    keys = "{max_turns: 3, feedback: '=?', turn_discount: 0.5}"
    run = playground.run(
        "grpo",
        f"{WORKFLOW}=multi_turn",
        f"{WORKFLOW}_kwargs={keys}",
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.stop=['" + "','".join("abcdefghijklmnop") + "']",
        "trainer.total_training_steps=2",
        "trainer.save_groups=all",
        "trust.check_freq=1",
        "data.val_files=${data.train_files}",
        "trainer.val_before_train=true",
    )
    batch = saved(run)

    seen = set[int]()
    for i, mask in enumerate(batch["response_mask"].split(1)):
        length = int(batch.lengths("response")[i])
        turns = int((torch.nn.functional.pad(mask[0, :length], (1, 0)).diff() > 0).sum())
        right = sum(map(ord, batch["responses"][i])) % 3 == 0
        assert float(batch["acc"][i]) == float(right)
        assert float(batch["scores"][i]) == pytest.approx(0.5 ** (turns - 1) * right)
        seen.add(turns)
        reasons = {"stop"} if right else {"length", "max_turns"}
        assert batch["finish_reason"][i] in reasons

    assert seen == {1, 2, 3} and "max_turns" in batch["finish_reason"]


def test_a_limit_that_ends_an_episode_costs_its_penalty(tmp_path):
    playground = Playground(tmp_path)
    penalties = {"max_turns": 0.5, "length": 0.25, "stop": 0.0}
    playground.write_reward(REWARDED)
    keys = (
        *(
            "grpo",
            f"{WORKFLOW}=multi_turn",
            f"{WORKFLOW}_kwargs={{max_turns: 3, feedback: '=?', turn_discount: 0.5}}",
        ),
        *("reward.limit_penalty={max_turns: 0.5, length: 0.25}", "data.max_response_length=20"),
        *(
            "actor_rollout_ref.rollout.stop=['" + "','".join("abcdefghijklmnop") + "']",
            "trust.check_freq=1",
        ),
        *("trainer.total_training_steps=1", "trainer.save_groups=all"),
    )
    run = playground.run(*keys)
    assert "rewards" in run.checks()[0]["passed"] and not run.notes("warning")
    batch = saved(run)
    assert {"max_turns", "length"} <= {*batch["finish_reason"]}

    for i, mask in enumerate(batch["response_mask"].split(1)):
        turns = int((torch.nn.functional.pad(mask[0], (1, 0)).diff() > 0).sum())
        right = sum(map(ord, batch["responses"][i])) % 3 == 0
        penalty = penalties[batch["finish_reason"][i]]
        assert float(batch["scores"][i]) == pytest.approx(0.5 ** (turns - 1) * right - penalty)
        assert (
            float(batch["acc"][i]) == float(right) and batch["reward_parts"][i]["limit"] == -penalty
        )


OF_ALL_TURNS = """
def compute_score(solution_str, ground_truth, conversation=()):
    said = [turn["text"] for turn in conversation if turn["owner"] == "policy"]
    asked = [turn["text"] for turn in conversation if turn["owner"] == "environment"]
    assert said and len(asked) == len(said) - 1 and set(asked) <= {"=?"}
    return {"score": sum(map(len, said)) / 24, "acc": sum(map(ord, solution_str)) % 3 == 0}
"""


def test_a_reward_function_may_see_all_turns_of_its_episode_and_the_checks_call_it_with_them(
    tmp_path, monkeypatch
):
    playground = Playground(tmp_path)
    playground.write_reward(OF_ALL_TURNS)
    common = (
        *("grpo", f"{WORKFLOW}=multi_turn", f"{WORKFLOW}_kwargs={{max_turns: 3, feedback: '=?'}}"),
        *(
            "data.max_response_length=24",
            "trainer.total_training_steps=2",
            "trainer.save_groups=all",
        ),
        *(
            "actor_rollout_ref.rollout.stop=['" + "','".join("abcdefghijklmnop") + "']",
            "trust.check_freq=1",
        ),
    )
    run = playground.run(*common)
    assert not run.notes("warning") and all(
        "reward_results" in step["passed"] for step in run.checks()
    )

    batch = saved(run)
    for i, told in enumerate(batch["conversation"]):
        said = [turn["text"] for turn in told if turn["owner"] == "policy"]
        assert float(batch["scores"][i]) == pytest.approx(sum(map(len, said)) / 24)

    assert max(len(told) for told in batch["conversation"]) > 2

    call = RewardRouter.__call__

    async def planted(self: RewardRouter, samples: Any) -> Any:
        return await call(
            self, [replace(each, conversation=each.conversation[-1:]) for each in samples]
        )

    monkeypatch.setattr(RewardRouter, "__call__", planted)
    with pytest.raises(TrustError, match=r"\(reward_results\): .* never called .* sample "):
        playground.run(*common, name="planted")


REWARDED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 3 == 0)
"""
