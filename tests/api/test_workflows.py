"""Workflows that are passed from Python."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import distflow
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.observe.run_reader import read_samples, sample_steps
from tests.api.small import ROWS, TINY, small
from tests.environments.areal_user import (
    GenerationHyperparameters,
    ModelRequest,
)

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


def test_train_takes_a_function(tmp_path: Path) -> None:
    run = distflow.train(TINY, unscored(tmp_path / "run"), data=ROWS, workflow=game("?"))
    assert run.status == "finished"
    assert [row["episodes/turns"] for row in run.metrics("train")] == [2.0, 2.0]
    scored(tmp_path / "run")


def test_a_loop_of_ones_own_gets_episodes(tmp_path: Path) -> None:
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


class Pairs:
    """An episode of AReaL's form with two rows, of two turns each, both of which ask at once."""

    gconfig = GenerationHyperparameters(max_new_tokens=2, n_samples=2)

    async def arun_episode(
        self, engine: Any, data: dict[str, Any]
    ) -> list[dict[str, torch.Tensor]]:
        return list(await asyncio.gather(*(self.row(engine) for _ in range(2))))

    async def row(self, engine: Any) -> dict[str, torch.Tensor]:
        first = await engine.agenerate(ModelRequest("", [5, 6, 7], self.gconfig.new(n_samples=1)))
        prompt = [*first.input_tokens, *first.output_tokens, 8]
        last = await engine.agenerate(ModelRequest("", prompt, self.gconfig.new(n_samples=1)))
        ids = prompt + last.output_tokens
        mask = [0] * 3 + [1] * first.output_len + [0] + [1] * last.output_len
        row = {"input_ids": ids, "loss_mask": mask, "rewards": sum(ids) % 7 / 6}
        return {name: torch.tensor([values]) for name, values in row.items()}


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_episode_of_areals_may_be_several_samples_of_the_group(
    tmp_path: Path, staleness: int
) -> None:
    """Every sample has its own tokens and reward, and the checks of each step hold."""
    changed: dict[str, object] = {
        "trust__check_freq": 1,
        "async__max_staleness": staleness,
        "trainer__save_groups": "all",
    }
    changed |= {"data__max_response_length": 6, "actor_rollout_ref__rollout__n": 4}
    run = distflow.train(TINY, unscored(tmp_path / "run", **changed), data=ROWS, workflow=Pairs())
    assert run.status == "finished"
    seen = set[tuple[int, ...]]()
    for path in sorted((tmp_path / "run" / "tokens").glob("*.safetensors")):
        batch = Batch.load(path)
        assert batch["episode_index"].tolist() == [0, 1, 2, 3] * 2
        for (ids, length), score in zip(_responses(batch), batch["scores"].tolist(), strict=True):
            assert score == pytest.approx((5 + 6 + 7 + sum(ids[:length])) % 7 / 6)
            seen.add(tuple(ids[:length]))
    assert len(seen) > 8, "each sample has draws of its own"
    changed = {"actor_rollout_ref__rollout__n": 3}
    with pytest.raises(UserError, match=r"rollout.n=3: each episode of 'Pairs' returns 2 samples"):
        distflow.train(TINY, unscored(tmp_path / "odd", **changed), data=ROWS, workflow=Pairs())


async def scores(chat: Any, row: Any, reward_fn: Any) -> Any:
    return await reward_fn(await chat.ask(row.prompt))


def _responses(batch: Any) -> list[tuple[list[int], int]]:
    return list(
        zip(batch["response_ids"].tolist(), batch.lengths("response").tolist(), strict=True)
    )
