"""Keys that nothing in a run takes are named; what a user's code names or is handed is taken."""

from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.launch.read_config import read_config
from distflow.launch.taken_keys import InertKeys
from tests.tiny_models import write_tiny_model

OWN = """
from distflow import NodeRole, node
from distflow.graph import Pipeline
from distflow.pipelines import nodes


@node(writes="advantages", role=NodeRole.ADVANTAGE)
def by_option(token_level_rewards, *, gamma: float = 1.0):
    return token_level_rewards * gamma


@node(writes="advantages", role=NodeRole.ADVANTAGE)
def by_config(token_level_rewards, config):
    return token_level_rewards


def around(function, **options):
    pipeline = Pipeline("own").add_node("rollout", nodes.generate)
    pipeline.add_node("reward", nodes.compute_reward)
    pipeline.add_node("log_probs", nodes.compute_old_log_prob, plane="training", only_forward_compute=True)
    pipeline.add_node("advantages", function, **options)
    return pipeline.add_node("update", nodes.train_actor).build()


def with_option():
    return around(by_option)


def with_value():
    return around(by_option, gamma=0.5)


def with_config():
    return around(by_config)
"""  # noqa: E501
READER = """
from own import around, by_option


def build(config):
    return around(by_option, gamma=config.algorithm.lam)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taken")
    write_tiny_model(folder / "model")
    (folder / "own.py").write_text(OWN)
    (folder / "reader.py").write_text(READER)
    return folder


def inert(folder: Path, preset: str, *overrides: str) -> list[str]:
    """The keys that are named."""
    needed = [f"actor_rollout_ref.model.path={folder}/model", "data.train_files=rows.jsonl"]
    try:
        read_config(load_config(preset, [*needed, *overrides]))
    except InertKeys as error:
        return list(error.keys)
    return []


CASES = {
    "an option of the estimator": ("ppo", ["algorithm.lam=0.9"], []),
    "an engine that is there": ("ppo", ["critic.optim.lr=1e-3"], []),
    "several processes": ("grpo", ["trainer.peers_timeout_s=5"], ["trainer.peers_timeout_s"]),
    "generation during updates": (
        "grpo",
        ["actor_rollout_ref.rollout.num_threads=1"],
        ["actor_rollout_ref.rollout.num_threads"],
    ),
    "the default": ("grpo", ["critic.optim.lr=1e-5"], []),
    "scores of responses": ("sft", ["reward.timeout_s=5"], ["reward.timeout_s"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_key_is_taken_by_a_part_of_the_run_or_named(folder, name):
    preset, overrides, expected = CASES[name]
    assert inert(folder, preset, *overrides) == expected


@pytest.mark.parametrize(
    ("pipeline", "key", "is_taken"),
    [
        ("own.py:with_option", "algorithm.gamma=0.9", True),
        ("own.py:with_value", "algorithm.gamma=0.9", False),
        ("own.py:with_config", "algorithm.gamma=0.9", True),
        ("own.py:with_config", "critic.optim.lr=0.9", False),
        ("own.py:with_value", "algorithm.lam=0.5", False),
        ("reader.py:build", "algorithm.lam=0.5", True),
    ],
)
def test_what_a_users_code_names_is_taken(folder, monkeypatch, pipeline, key, is_taken):
    monkeypatch.syspath_prepend(str(folder))
    own = [f"dag.pipeline={folder}/{pipeline}", "actor_rollout_ref.actor.use_kl_loss=false"]
    assert inert(folder, "grpo", *own, key) == ([] if is_taken else [key.partition("=")[0]])
