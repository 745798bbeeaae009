"""Real runs with a sleep in one place: its seconds are found in that phase, or in that wait."""

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
from distflow.observe.report.step_times import StepTimes
from distflow.observe.run_records import RunRecords
from distflow.rollout.embedded.engine import EmbeddedEngine
from tests.e2e.runs import Playground
from tests.environments.test_tools_of_a_workflow import Callers

pytestmark = pytest.mark.slow
SLEEP = 4.0
STEPS = 2
KEYS = (
    f"trainer.total_training_steps={STEPS}",
    "trust.check_freq=0",
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


def phase_seconds(times: StepTimes, actor: str, phase: str) -> float:
    """Of work in a phase, and of waits in it."""
    own = [part for part in times.parts if (part.actor, part.phase) == (actor, phase)]
    return sum(part.seconds for part in own)


def idle_seconds(times: StepTimes, cause: str) -> float:
    """In which a worker did nothing, and something waited for the cause."""
    return sum(s for (_, name), s in times.idle_causes.items() if name == cause)


def test_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ground = Playground(tmp_path)
    ground.write_reward(REWARD.replace("SLEEP", str(SLEEP)))
    run = ground.run("grpo", *KEYS)
    idle = idle_seconds(RunRecords(run.folder).times, "reward functions")
    assert idle == pytest.approx(STEPS * SLEEP, rel=0.05)
    assert main(["why", str(run.folder), "2"]) == 0
    said = capsys.readouterr().out
    assert "reward for reward functions" in said.partition("\nwaits     ")[2].splitlines()[0]
    assert main(["why", str(run.folder), "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 2 and len(told["groups"]) == 4 and len(told["groups"][0]["scores"]) == 4
    waits = {each["waits_for"]: each["seconds"] for each in told["waits"]}
    assert waits["reward functions"] == pytest.approx(SLEEP, rel=0.1)


def test_a_weight_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EmbeddedEngine.load_weights

    async def slow(engine: EmbeddedEngine, *weights: Any) -> Any:
        await asyncio.sleep(SLEEP)
        return await whole(engine, *weights)

    monkeypatch.setattr(EmbeddedEngine, "load_weights", slow)
    run = Playground(tmp_path).run("grpo", *KEYS)
    # One sync more is outside of the steps.
    slept = phase_seconds(RunRecords(run.folder).times, "training", "update_weights")
    assert slept == pytest.approx(STEPS * SLEEP, rel=0.05)


def test_one_rank_of_two(tmp_path: Path) -> None:
    ground = Playground(tmp_path)
    (tmp_path / "slow.py").write_text(PIPELINE.replace("SLEEP", str(SLEEP)))
    keys = (*KEYS, "trainer.n_gpus_per_node=2", f"dag.pipeline={tmp_path}/slow.py:slow")
    _, spec = ground.spec("grpo", *keys)
    launch_processes(spec)
    times = RunRecords(tmp_path / "run").times
    slept = pytest.approx(STEPS * SLEEP, rel=0.05)
    assert times.waits()["training", "other ranks"] == slept
    (phase,) = {part.phase for part in times.parts if part.phase.startswith("slow")}
    assert phase_seconds(times, "training-1", phase) == slept


def test_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sleeps = LazyRows.prepare, list[float]()

    def slow(rows: LazyRows, indices: Sequence[int]) -> None:
        if indices:
            time.sleep(SLEEP)
            sleeps.append(SLEEP)
        whole(rows, indices)

    monkeypatch.setattr(LazyRows, "prepare", slow)
    run = Playground(tmp_path).run("grpo", *KEYS, "data.lazy=true")
    idle = idle_seconds(RunRecords(run.folder).times, "data")
    assert idle == pytest.approx(STEPS * SLEEP, rel=0.05)


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
    idle = idle_seconds(RunRecords(run.folder).times, "tool calculator")
    assert idle == pytest.approx(slept, rel=0.05)
