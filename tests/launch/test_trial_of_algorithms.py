"""A user's loss or estimator that a run could not use is refused before a model is loaded."""

from pathlib import Path

import pytest

from distflow.errors import UserError
from tests.e2e.runs import Playground

OWN = """
import torch

calls = []

def detached(log_probs, advantages, loss_mask):
    return -(log_probs.detach() * advantages), {}

def one_number(log_probs, advantages, loss_mask):
    return -(log_probs * advantages).mean()

def alone(log_probs, advantages, loss_mask):
    return -(log_probs * advantages)

def reads_more(log_probs, advantages, loss_mask):
    return -(log_probs * advantages)[:, [9]].expand_as(log_probs), {}

def advantages_alone(token_level_rewards, response_mask):
    return token_level_rewards

def of_samples(token_level_rewards, response_mask):
    return token_level_rewards.sum(-1), token_level_rewards.sum(-1)

def no_such_name(log_probs, advantages, loss_mask):
    return -(logprobs * advantages), {}

def no_such_method(token_level_rewards, response_mask):
    return token_level_rewards.summed(), token_level_rewards

def fails(token_level_rewards, response_mask):
    raise KeyError("only in a run")
"""
LOSS, ESTIMATOR = "actor_rollout_ref.actor.policy_loss", "algorithm.adv_estimator"


@pytest.mark.parametrize(
    "key, function, message",
    [
        (LOSS, "detached", "no gradient with respect to log_probs"),
        (LOSS, "one_number", "must return .loss per token, statistics by name., but returned one number"),
        (LOSS, "alone", "a tensor of shape .* alone"),
        (LOSS, "no_such_name", r"NameError: .*'logprobs' is not defined.* \(at own.py:25\)"),
        (ESTIMATOR, "no_such_method", r"AttributeError: .*'summed' \(at own.py:28\)"),
        (ESTIMATOR, "advantages_alone", "1 values for the fields advantages, returns"),
        (ESTIMATOR, "of_samples", "column 'advantages' is per response token"),
    ],
)
def test_what_a_run_could_not_use_is_refused(tmp_path: Path, key: str, function: str, message: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    ground = Playground(tmp_path)
    with pytest.raises(UserError, match=f"{key}: .*{message}"):
        ground.run("grpo", f"{key}={tmp_path}/own.py:{function}", "trainer.total_training_steps=1")
    assert not list(tmp_path.rglob("metrics.jsonl")), "no run began"


def test_what_fails_on_made_up_numbers_alone_is_left_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    run = Playground(tmp_path).run("grpo", f"{LOSS}={tmp_path}/own.py:reads_more", "trainer.total_training_steps=1")
    assert len(run.metrics()) == 1
