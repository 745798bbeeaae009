"""Real runs with a sleep in one place: its seconds are found in that phase, or in that wait."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from distflow.cli import main
from distflow.observe.report.step_times import StepTimes
from distflow.observe.run_records import RunRecords
from distflow.rollout.embedded.engine import EmbeddedEngine
from tests.e2e.runs import Playground

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
