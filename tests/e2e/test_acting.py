"""Runs whose policy acts in a simulator: checked, resumed, over two processes; and faults that the
checks find."""

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.observe.run_reader import read_samples
from tests.e2e.runs import Playground
from tests.tiny_models import tiny_tokenizer
from tests.tiny_vision_models import write_tiny_llava

FILE = f"{Path(__file__).parents[1] / 'acting' / 'faulty.py'}:"
ACTS = (
    *(
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.workflow=simulator",
        "trust.check_freq=1",
    ),
    *(
        "data.max_prompt_length=48",
        "data.max_response_length=9",
        "trainer.total_training_steps=2",
        "~reward.functions",
    ),
    *(
        "~custom_reward_function.path",
        "~reward.num_workers",
        "actor_rollout_ref.actor.optim.scheduler=constant",
    ),
)


def options(**changes: Any) -> str:
    """All tokens are actions, so that random weights reach some targets."""
    bins = len(tiny_tokenizer())
    actions = {
        "bins": bins,
        "low": -1.5,
        "high": 1.5,
        "action_dim": 2,
        "action_chunks_len": 4,
        "first_token": 0,
    }

    return f"actor_rollout_ref.rollout.workflow_kwargs={flow({'env': 'gridreach', 'actions': actions, **changes})}"  # noqa: E501


def flow(value: Any) -> str:
    """As an override writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {flow(each)}" for name, each in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture
def playground(tmp_path):
    made = Playground(tmp_path)
    write_tiny_llava(tmp_path / "model")
    made.write_rows([{"prompt": f"{number}", "answer": "", "seed": number} for number in range(12)])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "embodied_srpo"])
def test_every_check_of_a_run_passes(playground, preset):
    run = playground.run(preset, *ACTS, options())
    passed = {name for step in run.checks() for name in step["passed"]}
    assert {"episodes", "gradients", "log_probs", "masks", "rewards", "turns", "versions"} <= passed
    assert not run.notes("warning")
    samples = read_samples(run.folder, 1)
    assert {row["finish_reason"] for row in samples} <= {"stop", "max_steps", "no_action"}
    assert all(0 <= row["reward_parts"]["env_steps"] <= 8 for row in samples)
    assert {row["score"] for row in samples} == {0.0, 1.0}
    assert all(
        ("srpo_distance" in row["reward_parts"]) == (preset == "embodied_srpo") for row in samples
    )


@pytest.mark.slow
def test_an_episode_whose_simulator_fails_is_never_a_zero(playground):
    """Places from 100 on fail: a group with one is replaced."""
    playground.write_rows(
        [{"prompt": f"{n}", "answer": "", "seed": 150 if n % 3 == 0 else n} for n in range(12)]
    )
    prompt = "{instruction}{state}"
    faulty = options(env=f"{FILE}Fails", env_kwargs={"how": "dies"}, prompt=prompt, score="return")
    run = playground.run("grpo", *ACTS, faulty, "reward.on_error=drop", "reward.max_error_rate=1")
    samples = read_samples(run.folder, 1)
    assert samples and all(row["errors"] is None and row["score"] > 0 for row in samples)
    assert "env_error" in (run.folder / "ledger.jsonl").read_text()
