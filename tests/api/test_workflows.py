"""Workflows that are passed from Python."""

from pathlib import Path
from typing import Any

import pytest

import distflow
from distflow.observe.run_reader import read_samples, sample_steps
from tests.api.small import ROWS, TINY, small

pytestmark = pytest.mark.slow


def game(sign: str) -> Any:
    """A function that no other process can import, with a value of its own."""

    @distflow.workflow
    async def play(chat: Any, row: Any, *, rounds: int = 2) -> dict[str, float]:
        reply = await chat.ask(row.prompt, max_tokens=1)
        while chat.turns < rounds:
            reply = await chat.ask(sign, max_tokens=1)
        return {"letters": sum(map(ord, reply.text)) % 3, "turns": 0.25 * chat.turns}

    return play


def unscored(folder: Path, **changed: object) -> dict[str, object]:
    """Settings without those of reward functions."""
    of_rewards = ("reward.", "trust.check_rewards")
    return {
        key: value
        for key, value in small(folder, **changed).items()
        if not key.startswith(of_rewards)
    }


def scored(folder: Path) -> None:
    rows = [row for step in sample_steps(folder) for row in read_samples(folder, step)]
    assert rows
    for row in rows:
        assert row["score"] == sum(map(ord, row["response"])) % 3 + 0.5
        assert row["reward_parts"] == {"letters": row["score"] - 0.5, "turns": 0.5}


def test_train_takes_a_function(tmp_path):
    run = distflow.train(TINY, unscored(tmp_path / "run"), data=ROWS, workflow=game("?"))
    assert run.status == "finished"
    assert [row["episodes/turns"] for row in run.metrics("train")] == [2.0, 2.0]
    scored(tmp_path / "run")


def test_a_loop_of_ones_own_gets_episodes(tmp_path):
    settings = unscored(tmp_path / "run", actor_rollout_ref__rollout__workflow_kwargs={"rounds": 3})
    with distflow.rollouts(TINY, settings, workflow=game("=")) as rollouts:
        for row in ROWS[:2]:
            rollouts.submit(row)
        batch = rollouts.wait(2)
        given = (batch["response_mask"] == 0) & batch.mask("response")

        # two drawn and one given; two more have no room
        assert batch.lengths("response").tolist() == [3] * 4
        assert given.sum(-1).tolist() == [1] * 4 and batch["finish_reason"] == ["length"] * 4
        rollouts.train(batch)
        rollouts.publish()
