"""A user's loss or estimator that a run could not use is refused before a model is loaded."""

from contextlib import nullcontext

import pytest

from distflow.config import load_config
from distflow.errors import UserError
from distflow.launch.make_spec import make_spec
from tests.e2e.runs import Playground

OWN = """
import torch

calls = []

def detached(log_probs, advantages, loss_mask):
    return -(log_probs.detach() * advantages), {}

def said_in_words(log_probs, advantages, loss_mask):
    return -(log_probs * advantages), {"n": "three"}

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

def with_ctx(token_level_rewards, response_mask, ctx):
    return token_level_rewards[:1], token_level_rewards[:1]

def with_batch(batch):
    return batch["response_mask"].sum(-1), batch["response_mask"].sum(-1)

def misspelt_with_ctx(batch, ctx):
    return scores, scores

def reads_tokenizer(token_level_rewards, response_mask, ctx):
    ctx.tokenizer.eos_token_id
    return token_level_rewards, token_level_rewards

def nothing(batch):
    print(batch)

def not_a_number(log_probs, advantages, loss_mask):
    return -(log_probs * advantages) / 0, {}

def no_loss(advantages):
    return advantages, {}

def fails(token_level_rewards, response_mask):
    raise KeyError("only in a run")

def verl_per_token(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    return -log_prob * advantages, 0, 0, 0

def ascent(log_probs, advantages, loss_mask):
    return log_probs * advantages * loss_mask, {}

def verl_ascent(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return ((log_prob - old_log_prob).exp() * advantages * response_mask).mean(), *torch.zeros(3)

def deaf(log_probs, advantages, loss_mask):
    return -log_probs, {}

def imitates(log_probs, loss_mask):
    return -log_probs, {}

def rises_on_gains(log_probs, old_log_probs, advantages, loss_mask):
    return -(log_probs - old_log_probs).exp() * advantages.clamp(min=0) - log_probs, {}
"""  # noqa: E501
NODES = """
from distflow import NodeRole, node
from distflow.graph import Drop, Node
from distflow.pipelines.grpo import grpo_pipeline


def with_node(name, function, writes="token_level_rewards"):
    def pipeline():
        graph = grpo_pipeline()
        graph.add_node(Node(name, node(writes=writes, role=NodeRole.REWARD)(function)))
        return graph
    return pipeline


def first(token_level_scores, response_mask):
    return token_level_scores[:1]

def doubles(token_level_scores, response_mask):
    token_level_scores *= 2

def no_such_name(token_level_scores, response_mask):
    return token_level_scoers

def divides(token_level_scores, response_mask):
    return token_level_scores / 0

def drops(token_level_scores, response_mask):
    return Drop("dull")

def sound(token_level_scores, response_mask):
    return token_level_scores * 2

rows, in_place, misspelt = with_node("rows", first), with_node("in_place", doubles, ()), with_node("x", no_such_name)
infinite, dropping = with_node("x", divides), with_node("x", drops)
replaces = with_node("x", sound, "token_level_scores")
"""  # noqa: E501
LOSS = "actor_rollout_ref.actor.policy_loss"
ESTIMATOR = "algorithm.adv_estimator"


@pytest.mark.parametrize(
    "key, function, message",
    [
        (LOSS, "detached", "no gradient with respect to log_probs"),
        (
            LOSS,
            "said_in_words",
            "return .losses, .*'three'",
        ),
        (
            LOSS,
            "one_number",
            r"return .losses, .* shape \(\)",
        ),
        (LOSS, "alone", r"return .losses, .* shape \(4, 5\)"),
        (
            LOSS,
            "verl_per_token",
            r"4 scalars, .* shape \(4, 5\), 0, 0, 0: .*agg_loss",
        ),
        (LOSS, "no_such_name", r"NameError: .*'logprobs' is not defined.* \(at own.py:28\)"),
        (ESTIMATOR, "no_such_method", r"AttributeError: .*'summed' \(at own.py:31\)"),
        (ESTIMATOR, "advantages_alone", "1 values for the fields advantages, returns"),
        (ESTIMATOR, "of_samples", "column 'advantages' is per response token"),
        (
            ESTIMATOR,
            "nothing",
            "no advantages, returns: ",
        ),
        (LOSS, "not_a_number", "gives no finite gradient for ordinary log-probs"),
        (
            LOSS,
            "no_loss",
            r"(?!.*policy loss.*policy loss).*no log_probs",
        ),
        (ESTIMATOR, "with_ctx", "returned something that does not fit"),
        (ESTIMATOR, "with_batch", "column 'advantages' is per response token"),
        (ESTIMATOR, "misspelt_with_ctx", "NameError: .*'scores' is not defined"),
    ],
)
def test_what_a_run_could_not_use_is_refused(tmp_path, key, function, message):
    (tmp_path / "own.py").write_text(OWN)
    ground = Playground(tmp_path)
    with pytest.raises(UserError, match=f"{key}.*{message}"):
        ground.run("grpo", f"{key}={tmp_path}/own.py:{function}", "trainer.total_training_steps=1")
    assert not list(tmp_path.rglob("metrics.jsonl")), "no run began"


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("rows", r"'rows' .* shape \(1, 5\).*own\.py:first"),
        ("in_place", "'in_place' .*'token_level_scores' in place"),
        ("misspelt", "'x' raised NameError: .*'token_level_scoers'"),
        (
            "replaces",
            "'x' writes token_level_scores, .*@node.writes=.token_level_rewards",
        ),
        ("infinite", None),
        ("dropping", None),
    ],
)
def test_nodes_are_tried_before_a_model_is_loaded(tmp_path, pipeline, message):
    (tmp_path / "own.py").write_text(NODES)
    keys = Playground(tmp_path).overrides("run", f"dag.pipeline={tmp_path}/own.py:{pipeline}")
    with (
        pytest.raises(UserError, match=rf"dag\.pipeline: node {message}")
        if message
        else nullcontext()
    ):
        make_spec(load_config("grpo", keys), say=lambda line: None)


@pytest.mark.parametrize(
    ("key", "function"), [(LOSS, "reads_more"), (ESTIMATOR, "reads_tokenizer")]
)
def test_what_fails_on_made_up_numbers_alone_is_left_to_the_run(tmp_path, key, function):
    (tmp_path / "own.py").write_text(OWN)
    run = Playground(tmp_path).run(
        "grpo", f"{key}={tmp_path}/own.py:{function}", "trainer.total_training_steps=1"
    )
    assert len(run.metrics()) == 1


@pytest.mark.parametrize(
    ("function", "note"),
    [
        ("ascent", "seems to have its sign reversed"),
        ("verl_ascent", "seems to have its sign reversed"),
        ("deaf", "takes advantages, but does not depend on them"),
        ("imitates", None),
        ("rises_on_gains", None),
    ],
)
def test_a_loss_that_advantages_do_not_steer_is_noted(tmp_path, function, note):
    (tmp_path / "own.py").write_text(OWN)
    lines = list[str]()
    keys = Playground(tmp_path).overrides("run", f"{LOSS}={tmp_path}/own.py:{function}")
    make_spec(load_config("grpo", keys), say=lines.append)
    found = [line for line in lines if line.startswith("note: the loss")]
    assert len(found) == (note is not None) and all(
        f"own.py:{function}' {note}" in line for line in found
    )
