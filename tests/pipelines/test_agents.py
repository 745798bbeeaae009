"""Several agents in an episode: what each of them is trained on, and by which advantage."""

import asyncio
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.config import ConfigError, load_config
from distflow.data.batch import Batch
from distflow.environments.chat import Agents
from distflow.environments.workflows import Row, load_workflow
from distflow.errors import UserError
from distflow.graph import Node
from distflow.graph.bind_to_config import bind_alone
from distflow.pipelines.nodes import compute_advantage
from distflow.pipelines.nodes.reward_samples import reward_episodes
from distflow.pipelines.nodes.settings_by_domain import run_part
from distflow.rewards.reward_results import Error
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group import Group
from distflow.training.engine import OneRank
from tests.pipelines.test_episodes import Engine, run_group

AGENTS = "actor_rollout_ref.rollout.agents"
THREE = (
    f"{AGENTS}={{solver: {{}}, checker: {{system_prompt: 'C:', max_tokens: 3}}, judge: "
    f"{{trainable: false}}}}"
)
OWN = "algorithm.agent_rewards=own"
FLOW = "actor_rollout_ref.rollout.workflow=flows.py:several"


async def talk(agents: Agents, row: Row) -> Any:
    """In turns, then at once."""
    solver = agents["solver"]
    checker = agents["checker"]
    await solver.ask((7,))
    await checker.ask("ab")
    await agents["judge"].ask((7,))
    await asyncio.gather(solver.ask((6,)), checker.fork().ask((9 + 1,)), agents["judge"].ask((3,)))
    return {"solver": 1.0, "checker": 0.25, "judge": 5.0}


def test_each_agent_has_what_it_saw_as_prompt_and_what_it_said_as_response() -> None:
    engine = Engine()
    group = asyncio.run(run_group(talk, engine, 0, more=[FLOW, THREE]))
    batch = group.batch()
    assert group.samples[0].valid and len(group.samples) == 2
    seen = next(
        list(prompt)
        for prompt, _ in engine.asked
        if len(prompt) > 1 and prompt[-1] != 6 and prompt[0] != 7
    )

    for row in range(2):
        assert batch["forks"][row] == [["checker", 3], ["checker.1", 4 + len(seen)]]
        ids = batch["response_ids"][row].tolist()
        mask = batch["response_mask"][row].tolist()
        assert batch["prompt_ids"][row].tolist() == [7] and ids[:3] == [5, 6, 5]
        assert ids[3:] == [*seen, 5, *seen, 5, 10, 5], (
            "the judge, which is not trained, is not in it"
        )
        assert mask == [1, 0, 1, *[0] * len(seen), 1, *[0] * len(seen), 0, 0, 1]

    said = [
        (turn["agent"], turn["owner"], turn.get("fork")) for turn in group.samples[0].conversation
    ]
    assert [agent for agent, owner, _ in said if owner == "policy"] == [
        *("solver", "checker", "judge"),
        *("solver", "checker", "judge"),
    ], "people see all of them, in the order in which they spoke"
    assert ("checker", "policy", "1") in said
    assert group.measured[0][0]["episodes/idle_agents"] == 0


def test_settings_of_an_agent_are_those_of_its_requests_alone() -> None:
    found = {}

    class Settings(Engine):
        async def generate(self, request: Any) -> Any:
            found[request.stream.name.rpartition("/")[2]] = request.params
            return await super().generate(request)

    asyncio.run(
        run_group(
            talk,
            Settings(),
            2,
            more=[FLOW, THREE.replace("max_tokens: 3", "max_tokens: 1, stop: ['!']")],
        )
    )
    assert found["fork checker"].max_tokens == found["fork checker.1"].max_tokens == 1
    assert found["fork checker"].stop == ("!",) and not found["fork judge"].stop
    assert found["fork judge"].max_tokens > 1


def test_agents_that_nobody_calls_are_counted_and_one_that_is_not_there_is_an_error() -> None:
    async def one(agents: Agents, row: Row) -> float:
        await agents["solver"].ask((7,))
        return 1.0

    group = asyncio.run(run_group(one, Engine(), 0, more=[FLOW, THREE]))
    assert group.measured[0][0]["episodes/idle_agents"] == 4 and all(
        sample.valid for sample in group.samples
    )

    async def other(agents: Agents, row: Row) -> float:
        await agents["solver"].ask((7,))
        await agents["chekker"].ask((7,))
        return 1.0

    group = asyncio.run(run_group(other, Engine(), 0, more=[FLOW, THREE]))
    outcome: Any = group.samples[0].outcome
    assert not group.samples[0].valid and isinstance(outcome.reward_result, Error)
    assert "ChatError: agents['chekker']" in str(outcome)
    assert "(at test_agents.py" in str(outcome)

    async def frozen(agents: Agents, row: Row) -> float:
        await agents["judge"].ask((7,))
        return 1.0

    group = asyncio.run(run_group(frozen, Engine(), 0, more=[FLOW, THREE]))
    assert "of an agent that is trained" in str(group.samples[0].outcome)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (1.0, "needs a score of each agent"),
        ({"solver": 1.0}, "needs a score of each agent"),
        ({"solver": 1.0, "checker": 1.0, "bonus": 2.0}, "needs a score of each agent"),
        ({"solver": math.nan, "checker": 1.0}, "nan"),
    ],
)
def test_own_rewards_need_a_score_of_each_agent_that_spoke(returned: Any, said: str) -> None:
    async def run(agents: Agents, row: Row) -> Any:
        await talk(agents, row)
        return returned

    group = asyncio.run(run_group(run, Engine(), 0, more=[FLOW, THREE, OWN]))
    assert not group.samples[0].valid and said in str(group.samples[0].outcome)


def scored(group: Group) -> Batch:
    """With the columns of the reward node."""
    batch = group.batch()
    config = load_config("grpo", overrides=[FLOW, THREE, OWN], complete=False).config
    ctx: Any = NodeContext(config, 0, None, group=group)  # type: ignore[arg-type]
    columns: Any = asyncio.run(reward_episodes(group.samples, ctx, min_valid=0))
    for name, value in columns.items():
        batch[name] = value
    return batch


def test_own_rewards_lie_on_the_replies_of_their_agent() -> None:
    async def run(agents: Agents, row: Row) -> Any:
        await agents["solver"].ask((7,))
        agents["solver"].reward(0.75)
        await talk_on(agents)
        return {"solver": 1.0, "checker": 0.25, "judge": 5.0, "acc": 1.0}

    async def talk_on(agents: Agents) -> None:
        await agents["checker"].ask((7,))
        await agents["judge"].ask((7,))
        await agents["solver"].ask((6,))

    batch = scored(
        asyncio.run(
            run_group(
                run, Engine(), 0, more=[FLOW, THREE.replace("system_prompt: 'C:', ", ""), OWN]
            )
        )
    )
    assert batch["response_ids"][0].tolist() == [5, 6, 5, 7, 5]
    assert batch["token_level_scores"][0].tolist() == [0.75, 0, 0.25, 0, 0.25]
    assert batch["turn_index"][0].tolist() == [0, -1, 1, -1, 2]
    assert batch["turn_order"][0].tolist() == [0, -1, 2, -1, 1], "the checker spoke second"
    assert batch["scores"].tolist() == [1.25, 1.25] and batch["acc"].tolist() == [1.0, 1.0], (
        "without the judge's"
    )


NAMES = ("solver", "checker", "critic", "editor")


def episodes(num_agents: int, seed: int) -> Batch:
    """Eight episodes in two groups, in which agents speak several times or not at all; one is not
    valid."""
    torch.manual_seed(seed)
    lengths = []
    forks = []
    masks = []
    for row in range(8):
        mask = []
        own = []
        for agent in range(num_agents):
            is_silent = (row + agent + seed) % 4 == 0 and num_agents > 1 and row != 5
            length = 2 + (row * 3 + agent * 5) % 4
            if agent and not is_silent:
                own.append([NAMES[agent], len(mask)])

            if not agent or not is_silent:
                drawn = [
                    0.0,
                    *[float((row + t) % 3 != 0) for t in range(length - 2)],
                    float(not is_silent),
                ]
                mask += [0.0] * (length - len(drawn)) + drawn if not is_silent else [0.0] * length

        if not any(mask):
            mask[-1] = 1.0
        lengths.append(len(mask))
        forks.append(own)
        masks += mask

    batch = Batch(torch.ones(8, dtype=torch.int64), torch.tensor(lengths))
    batch["uid"] = [f"{row // 4}-{row}" for row in range(8)]
    batch["forks"] = forks
    batch["domain"] = ["default"] * 8
    batch["prompt_ids"] = torch.ones(8).long()
    batch["response_ids"] = torch.ones(len(masks)).long()
    batch["response_mask"] = torch.tensor(masks)
    batch["token_level_rewards"] = torch.randn(len(masks)) * torch.tensor(masks)
    batch["group_index"] = torch.arange(8) // 4 + 3
    batch["valid"] = torch.arange(8) != 2

    return batch


def expected(batch: Batch, names: tuple[str, ...], is_margin: bool) -> list[list[float]]:
    """GRPO by hand, float64: the score of an agent in an episode among those of the same agent in
    its group."""
    talks = []
    for row in range(len(batch)):
        length = int(batch.lengths("response")[row])
        starts = [0, *(start for _, start in batch["forks"][row]), length]
        owners = [names[0], *(name for name, _ in batch["forks"][row])]

        said: dict[str, list[int]] = {}
        for name, start, end in zip(owners, starts, starts[1:], strict=False):
            said.setdefault(name, []).extend(
                t for t in range(start, end) if batch["response_mask"][row, t] > 0
            )

        rewards = {
            n: sum(float(batch["token_level_rewards"][row, t]) for t in own)
            for n, own in said.items()
            if own
        }
        if is_margin and len(rewards) > 1:
            rewards = {
                n: mine - statistics.fmean(r for other, r in rewards.items() if other != n)
                for n, mine in rewards.items()
            }

        talks.append((said, rewards))

    rows = []
    for row, (said, rewards) in enumerate(talks):
        out = [0.0] * int(batch.lengths("response")[row])
        for name, own in said.items():
            if not own or not bool(batch["valid"][row]):
                continue

            peers = [
                theirs[name]
                for other, (_, theirs) in enumerate(talks)
                if other // 4 == row // 4 and name in theirs and bool(batch["valid"][other])
            ]
            alone = len(peers) == 1
            gap = rewards[name] if alone else rewards[name] - statistics.fmean(peers)
            scale = 1.0 if alone else statistics.stdev(peers)
            for t in own:
                out[t] = gap / (scale + 1e-6)

        rows.append(out)

    return rows


@pytest.mark.parametrize("rewards", ["own", "margin"])
@pytest.mark.parametrize("num_agents", [1, 2, 4])
def test_advantages_of_an_agent_are_among_its_own_of_the_group(
    num_agents: int, rewards: str
) -> None:
    names = NAMES[:num_agents]
    declared = ", ".join(f"{name}: {{}}" for name in names)
    keys = [FLOW, f"{AGENTS}={{{declared}}}", f"algorithm.agent_rewards={rewards}"]
    config = load_config("grpo", overrides=keys, complete=False).config
    batch = episodes(num_agents, seed=num_agents)
    part = bind_alone(Node("advantages", compute_advantage), config)
    ctx: Any = NodeContext(config, 0, None)  # type: ignore[arg-type]
    found: Any = run_part(part, batch, ctx, OneRank())

    wanted = expected(batch, names, rewards == "margin")
    for row, values in enumerate(wanted):
        own = found.batch["advantages"][row, : len(values)].tolist()
        assert own == pytest.approx(values, abs=1e-4)

    assert any(any(values) for values in wanted)


FILE = """
async def one(chat, row):
    return 1.0

async def several(agents, row):
    return 1.0
"""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([f"{AGENTS}={{a b: {{}}}}"], "agent 'a b'"),
        ([f"{AGENTS}={{a: {{temprature: 1}}}}"], "'temprature' for the agent 'a'"),
        ([THREE], "only a workflow has agents"),
        ([f"{AGENTS}={{a: {{trainable: false}}}}"], "none of the agents is trained"),
        ([OWN], "an episode has no agents"),
        ([THREE, OWN, "algorithm.adv_estimator=gdpo"], "reads the parts of the reward"),
        ([THREE, OWN, "algorithm.reward_shift=1"], "makes one reward of each episode's"),
        ([THREE, OWN, "reward_model.models={m: {path: DIR}}"], "a model scores episodes"),
    ],
)
def test_what_does_not_fit_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("grpo", overrides=keys)


def test_two_agents_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        "actor_rollout_ref:\n  rollout:\n    agents:\n      solver: {}\n"
        "      solver: {max_tokens: 3}\n"
    )
    with pytest.raises(ConfigError, match=r"agents\.solver .*two\.yaml:5\)\n.* line 4\n"):
        load_config(str(tmp_path / "two.yaml"))


def test_a_workflow_and_the_agents_of_the_config_fit(tmp_path: Path) -> None:
    (tmp_path / "flows.py").write_text(FILE)
    one, several = (load_workflow(f"{tmp_path}/flows.py:{name}", {}) for name in ("one", "several"))
    assert several.check_agents({"a": None}) is several and one.check_agents({}) is one
    with pytest.raises(UserError, match=r"'one' .*one\(agents, row\)"):
        one.check_agents({"a": None})
    with pytest.raises(UserError, match=r"'several' .*rollout\.agents"):
        several.check_agents({})
