"""Functions of the user that draw from, and seed, the global random generators: the run is as
repeatable as any."""

import pytest

from tests.e2e.cli_runs import CliRun, Left, same_run
from tests.e2e.runs import Playground

DRAWS = """
import random
import numpy as np
import torch


def noise():
    drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
    if drawn > 1.5:
        torch.manual_seed(0)
        np.random.seed(3)
        random.seed(4)
    return drawn + random.gauss(0, 1) + float(torch.randn(()))
"""
VERIFIER = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return noise()\n"
)
PROGRAM = """
import asyncio
import time
from distflow import NodeRole, Pipeline, node, register_adv_est, register_policy_loss
from distflow.pipelines import nodes


@node(writes="scores", role=NodeRole.REWARD)
def plain(responses):
    first = noise()
    time.sleep(random.Random(str(responses)).random() / 50)
    return [first + noise() for text in responses]


@node(writes={"jitter": "sample"})
async def waits(responses, ctx):
    async def one():
        await asyncio.sleep(random.random() / 50)
        return noise()

    first = noise()
    return [first + jitter for jitter in await asyncio.gather(*(one() for text in responses))]


@node(writes="acc", role=NodeRole.REWARD)
async def asks(samples, jitter, reward_fn):
    return [j.reward_result.value + float(more) + noise() for j, more in zip(await reward_fn(samples), jitter)]


@node(writes="token_level_rewards")
def both(token_level_scores, acc, response_mask):
    return token_level_scores + acc[:, None] * response_mask


@register_adv_est("drawn")
def drawn(token_level_rewards, response_mask):
    advantages = (token_level_rewards.sum(-1, keepdim=True) + noise()) * response_mask
    return advantages, advantages


@register_policy_loss("drawn")
def drawn_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    loss = -(log_prob * advantages * response_mask).sum() / response_mask.sum() * (1 + noise())
    return loss, torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)


def make():
    torch.manual_seed(5)
    pipeline = Pipeline("draws")
    pipeline.add_node("answer", nodes.generate)
    for name, fn in (("plain", plain), ("waits", waits), ("asks", asks)):
        pipeline.add_node(name, fn, deps=["answer"])
    pipeline.add_node("both", both, deps=["plain", "asks"])
    pipeline.add_node("old", nodes.compute_old_log_prob, only_forward_compute=True)
    pipeline.add_node("compare", nodes.compute_advantage, plane="training")
    pipeline.add_node("learn", nodes.train_actor)
    return pipeline.build()
"""  # noqa: E501


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("draws"), num_rows=10)
    (ground.folder / "drawing.py").write_text(DRAWS + PROGRAM)
    return ground


def start(ground: Playground, name: str, *more: str) -> CliRun:
    cheap = (
        "trust.check_rewards=false",
        "trainer.save_freq=1",
        "trainer.total_epochs=2",
        "reward.num_workers=2",
    )
    pipeline = (f"dag.pipeline={ground.folder}/drawing.py:make",)
    chosen = ("algorithm.adv_estimator=drawn", "actor_rollout_ref.actor.policy_loss=drawn")
    quiet = (
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )
    keys = ground.overrides(name, *cheap, *pipeline, *chosen, *quiet, *more)

    return CliRun(ground.folder / f"{name}.log", ["train", "grpo", *keys])


def finish(ground: Playground, name: str, *more: str) -> Left:
    run = start(ground, name, *more)
    assert run.status() == 0, run.said()
    return Left(ground.folder / name)


def kill_and_finish(ground: Playground, name: str, *more: str) -> Left:
    run = start(ground, name, *more)
    run.wait_for(
        lambda: (ground.folder / name / "checkpoints" / "step-000002" / "manifest.json").exists()
    )
    assert run.kill()
    return finish(ground, name, *more)


@pytest.mark.slow
def test_what_users_draw_anywhere_is_drawn_again_after_a_kill(ground):
    ground.write_reward(DRAWS + VERIFIER)
    whole = finish(ground, "whole")
    assert whole.checkpoint.step == 5
    same_run(whole, kill_and_finish(ground, "killed"))
    other = finish(ground, "other", "trainer.seed=2")
    assert any(not tensor.equal(other.tensors()[name]) for name, tensor in whole.tensors().items())
