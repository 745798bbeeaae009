"""Whole runs with several agents in an episode: they train, and the checks follow each of them."""

import pytest

from distflow.errors import TrustError
from distflow.training.torch_engine import TorchScorer
from tests.e2e.runs import Playground
from tests.environments.test_training import Games, saved

pytestmark = pytest.mark.slow

AGENTS = """
import asyncio

async def pair(agents, row):
    solver, checker = agents["solver"], agents["checker"]
    first = await solver.ask(row.prompt, max_tokens=3)
    said = await checker.ask(f"{row.prompt}{first.text}?", max_tokens=2)
    judged = await agents["judge"].ask(row.prompt, max_tokens=3)
    if sum(said.token_ids) % 2:
        await asyncio.gather(solver.ask("again", max_tokens=2), checker.fork().ask("wait", max_tokens=2))
    mine = sum(first.token_ids) % 5 / 4
    return {"solver": mine, "checker": sum(said.token_ids) % 3 / 2, "judge": 0.5}
"""  # noqa: E501
SOLVER = "solver: {}"
CHECKER = "checker: {system_prompt: 'C:', temperature: 1.3}"
JUDGE = "judge: {trainable: false}"


@pytest.fixture
def playground(tmp_path):
    playground = Games(tmp_path)
    (tmp_path / "pair.py").write_text(AGENTS)
    return playground


def keys(playground: Playground, rewards: str, *agents: str) -> list[str]:
    return [
        f"actor_rollout_ref.rollout.workflow={playground.folder}/pair.py:pair",
        f"actor_rollout_ref.rollout.agents={{{', '.join(agents)}}}",
        f"algorithm.agent_rewards={rewards}",
        "data.max_response_length=32",
        "trainer.save_groups=all",
        "trust.check_freq=1",
    ]


@pytest.mark.parametrize(
    ("rewards", "staleness", "first"), [("margin", 0, "solver"), ("own", 1, "judge")]
)
def test_agents_of_one_policy_train_and_every_check_passes(playground, rewards, staleness, first):
    run = playground.run(
        "grpo",
        *keys(
            playground,
            rewards,
            *((JUDGE, SOLVER, CHECKER) if first == "judge" else (SOLVER, CHECKER, JUDGE)),
        ),
        "trainer.total_training_steps=3",
        f"async.max_staleness={staleness}",
    )
    assert not run.notes("warning")
    found = run.checks()
    assert len(found) == 3

    for step in found:
        assert {"turns", "masks", "versions", "draws", "loss", "advantages", "rewards"} <= {
            *step["passed"]
        }
        assert not step["not_checked"]

    batch = saved(run)
    for row in range(len(batch)):
        names = [name for name, _ in batch["forks"][row]]
        assert [name for name in names if name[0] == "c"] in (["checker"], ["checker", "checker.1"])
        assert ("solver" in names) == (first == "judge") and "judge" not in names
        scores = batch["reward_parts"][row]
        assert float(batch["scores"][row]) == pytest.approx(scores["solver"] + scores["checker"])


def test_agents_are_compared_with_the_values_of_the_next_speaker(playground):
    run = playground.run(
        "ppo",
        *keys(playground, "shared", SOLVER, CHECKER, JUDGE),
        f"critic.model.path={playground.folder}/model",
        "algorithm.adv_estimator=gae_marft",
        "trainer.total_training_steps=2",
    )
    found = run.checks()
    assert len(found) == 2 and all({"advantages", "turns"} <= {*step["passed"]} for step in found)
    orders = [[turn for turn in row.tolist() if turn >= 0] for row in saved(run)["turn_order"]]
    assert any(order != sorted(order) for order in orders), (
        "the solver spoke again after the checker"
    )


HOT = (
    "solver: {temperature: 0.6, top_k: 20}",
    "checker: {system_prompt: 'C:', temperature: 1.7, top_p: 0.9}",
    JUDGE,
)


def test_a_trainer_at_the_temperature_of_another_agent_is_found(playground, monkeypatch):
    right = TorchScorer.temperature_of
    monkeypatch.setattr(
        TorchScorer, "temperature_of", lambda self, micro: right(self, micro).flip(0)
    )
    with pytest.raises(TrustError, match="another temperature"):
        playground.run("grpo", *keys(playground, "own", *HOT), "trainer.total_training_steps=1")
