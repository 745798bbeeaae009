"""Real runs with a sleep in one place: the idle invoice charges its seconds to that place."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.cluster.local_processes_launcher import launch_processes
from distflow.launch.data_sets import LazyRows
from distflow.observe.report.doctor import read_charges
from distflow.observe.report.idle_invoice import Charge
from distflow.rollout.embedded.engine import EmbeddedEngine
from tests.e2e.runs import Playground
from tests.environments.test_tools_of_a_workflow import Callers

pytestmark = pytest.mark.slow
SLEEP = 4.0
STEPS = 2
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    "trust.audit_freq=0",
    "trainer.val_before_train=false",
)
REWARD = """
import os, time

calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if calls % 16 == 1:
        time.sleep(SLEEP)
    return sum(map(ord, solution_str)) % 7 / 6
"""
PIPELINE = """
import time
from distflow import TaskGraph, node
from distflow.graph import Node
from distflow.pipelines.grpo import grpo_pipeline

@node(writes="token_level_rewards")
def slow_on_one_rank(token_level_scores, reduce):
    if reduce.rank == 1:
        time.sleep(SLEEP)
    return token_level_scores

def slow() -> TaskGraph:
    graph = grpo_pipeline()
    graph.add_node(Node("slow_on_one_rank", slow_on_one_rank, plane="training"))
    return graph
"""
TOOL = """
import json, pathlib, time

def calculator(expression: str) -> str:
    '''Wait.

    Args:
        expression: what is ignored
    '''
    began = time.time()
    time.sleep(SLEEP)
    with open(pathlib.Path(__file__).parent / "calls.jsonl", "a") as file:
        file.write(json.dumps([began, time.time()]) + "\\n")
    return "7"
"""


def check(run: Path, kind: str, cause: str, slept: float, device: int = 0) -> None:
    """Within 5 % of the sleeps, in a table in which each second is charged once."""
    found = read_charges(run)
    assert charged(found, kind, cause, device) == pytest.approx(slept, rel=0.05)
    spans = [json.loads(line) for path in (run / "spans").glob("*.jsonl") for line in path.open()]
    events = [json.loads(line)["t"] for line in (run / "events.jsonl").open()]
    wall = max(events + [span["t1"] for span in spans]) - min(
        events + [span["t0"] for span in spans]
    )
    devices = {each.device for each in found}
    assert sum(each.seconds for each in found) == pytest.approx(len(devices) * wall, rel=1e-3)
    unknown = sum(each.seconds for each in found if each.kind == "unknown")
    assert unknown <= 0.02 * len(devices) * wall


def charged(found: Sequence[Charge], kind: str, cause: str, device: int) -> float:
    return sum(c.seconds for c in found if (c.kind, c.cause, c.device) == (kind, cause, device))


def test_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ground = Playground(tmp_path)
    ground.write_reward(REWARD.replace("SLEEP", str(SLEEP)))
    run = ground.run("grpo", *KEYS)
    check(run.folder, "idle", "reward", STEPS * SLEEP)
    assert main(["why", str(run.folder), "2"]) == 0
    said = capsys.readouterr().out
    assert "reward" in said.partition("\nidle      ")[2].splitlines()[0]
    assert main(["why", str(run.folder), "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 2 and len(told["groups"]) == 4 and len(told["groups"][0]["scores"]) == 4
    (reward,) = [each["seconds"] for each in told["invoice"]["causes"] if each["cause"] == "reward"]
    assert reward == pytest.approx(SLEEP, rel=0.1)


def test_a_weight_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EmbeddedEngine.load_weights

    async def slow(engine: EmbeddedEngine, *weights: Any) -> Any:
        await asyncio.sleep(SLEEP)
        return await whole(engine, *weights)

    monkeypatch.setattr(EmbeddedEngine, "load_weights", slow)
    run = Playground(tmp_path).run("grpo", *KEYS)
    check(run.folder, "overhead", "update_weights", (STEPS + 1) * SLEEP)


def test_one_rank_of_two(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    (tmp_path / "slow.py").write_text(PIPELINE.replace("SLEEP", str(SLEEP)))
    keys = (*KEYS, "trainer.n_gpus_per_node=2", f"dag.pipeline={tmp_path}/slow.py:slow")
    _, spec = ground.spec("grpo", *keys)
    launch_processes(spec)
    found = read_charges(tmp_path / "run")
    cause = next(each.cause for each in found if each.cause.startswith("rank 1: slow"))
    check(tmp_path / "run", "idle", cause, STEPS * SLEEP)
    assert charged(found, "busy", cause.removeprefix("rank 1: "), 1) == pytest.approx(
        STEPS * SLEEP, rel=0.05
    )


def test_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sleeps = LazyRows.prepare, list[float]()

    def slow(rows: LazyRows, indices: Sequence[int]) -> None:
        if indices:
            time.sleep(SLEEP)
            sleeps.append(SLEEP)
        whole(rows, indices)

    monkeypatch.setattr(LazyRows, "prepare", slow)
    run = Playground(tmp_path).run("grpo", *KEYS, "data.lazy=true")
    check(run.folder, "idle", "data loader", STEPS * SLEEP)


def test_a_tool_of_an_episode(tmp_path: Path) -> None:
    ground = Callers(tmp_path)
    (tmp_path / "tool.py").write_text(TOOL.replace("SLEEP", str(SLEEP / 2)))
    tools = f"'{tmp_path}/tool.py:calculator'"
    run = ground.run(
        "grpo",
        f"actor_rollout_ref.model.path={tmp_path}/caller",
        "actor_rollout_ref.model.init=random",
        "data.prompt_format=chat",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.workflow=tools",
        (
            f"actor_rollout_ref.rollout.workflow_kwargs={{tools: [{tools}], max_turns: 2, format: "
            f"hermes}}"
        ),
        *KEYS,
    )
    calls = sorted(json.loads(line) for line in (tmp_path / "calls.jsonl").open())
    slept = 0.0
    until = 0.0
    for began, ended in calls:
        slept = slept + max(0.0, ended - max(began, until))
        until = max(until, ended)
    check(run.folder, "idle", "tool calculator", slept)
