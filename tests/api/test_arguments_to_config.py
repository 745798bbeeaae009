"""Values given in Python reach the config as they are."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from distflow.api.arguments_to_config import PythonInputs, to_lines
from distflow.api.train import read
from distflow.config import flatten, load_config

OPEN = {
    "actor_rollout_ref.model.path": "builtin:tiny-arithmetic",
    "data.train_files": "builtin:arithmetic-rl",
}
ODD = (
    "a, b",
    "it's",
    'say "x"',
    "back\\slash",
    "ends with \\",
    "{prompt}",
    "[x]",
    "a=b",
    "é ∑",
    "a\nb",
    "null",
)


@pytest.mark.parametrize("text", ODD)
def test_texts_of_every_kind(text):
    assert (
        load_config(
            "grpo", to_lines({**OPEN, "trainer.project_name": text})
        ).config.trainer.project_name
        == text
    )


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("actor_rollout_ref.actor.optim.lr", 1e-6, 1e-6),
        ("actor_rollout_ref.actor.optim.lr", np.float32(0.5), 0.5),
        ("actor_rollout_ref.actor.optim.lr", np.float64(0.5), 0.5),
        ("trainer.seed", np.int64(3), 3),
        ("trainer.seed", 3, 3),
        ("data.shuffle", False, False),
        ("trainer.total_training_steps", None, None),
        ("data.train_files", [Path("a.jsonl"), "b c.jsonl"], ("a.jsonl", "b c.jsonl")),
        ("actor_rollout_ref.actor.optim.betas", (0.8, 0.9), (0.8, 0.9)),
        ("actor_rollout_ref.actor.optim.betas", np.array([0.8, 0.9]), (0.8, 0.9)),
        ("trainer.logger", [], ()),
    ],
)
def test_values_of_every_kind(key, value, read):
    assert flatten(load_config("grpo", to_lines({**OPEN, key: value})).config)[key] == read


def test_nested_and_dotted_keys_are_the_same():
    dotted = {
        "trainer.seed": 3,
        "actor_rollout_ref.actor.optim.lr": 0.1,
        "trainer.logger": ["jsonl"],
    }
    nested = {
        "trainer": {"seed": 3, "logger": ["jsonl"]},
        "actor_rollout_ref": {"actor.optim": {"lr": 0.1}},
    }
    assert sorted(to_lines(dotted)) == sorted(to_lines(nested))


@pytest.mark.parametrize(
    "keys",
    [
        {"trainer.seed": 5},
        {"dag.pipeline": "dapo"},
        {"algorithm.adv_estimator": "gae"},
        {"algorithm.workflow_type": "DAPO"},
        {"algorithm.adv_estimator": "gae", "dag.pipeline": None},
    ],
)
def test_a_dict_without_defaults_is_the_config_of_the_same_file(keys, tmp_path):
    nested: dict[str, dict[str, object]] = {"data": {"train_files": OPEN["data.train_files"]}}
    nested["actor_rollout_ref"] = {
        "model": {"path": OPEN["actor_rollout_ref.model.path"], "init": "random"}
    }

    for key, value in keys.items():
        group, name = key.split(".")
        nested.setdefault(group, {})[name] = value

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nested))
    of_dict, of_file = (
        read(given, (), PythonInputs(), None).config for given in (nested, tmp_path / "run.yaml")
    )
    assert of_dict == of_file


def test_a_mapping_of_the_users_own_names_is_one_value():
    functions = {
        "default": ["math"],
        "openai/gsm8k": [{"name": "format", "weight": 0.5}],
        "a b": ["exact_match"],
    }
    config = load_config("grpo", to_lines({**OPEN, "reward": {"functions": functions}})).config
    assert {
        domain: [part[:2] for part in parts] for domain, parts in config.reward.functions.items()
    } == {
        "default": [("math", 1.0)],
        "openai/gsm8k": [("format", 0.5)],
        "a b": [("exact_match", 1.0)],
    }


@pytest.mark.parametrize(
    "overrides",
    [
        {"custom_reward_function.path": None},
        {"custom_reward_function": {"path": None, "name": "compute_score"}},
        ["custom_reward_function.path=null"],
        ["custom_reward_function.path=None"],
        {"actor_rollout_ref.rollout.workflow": None},
    ],
)
def test_a_key_with_its_default_is_not_set_beside_an_argument(overrides):
    def reward(solution_str: str) -> float:
        return 0.0

    lines = [f"{key}={value}" for key, value in OPEN.items() if key != "data.train_files"]
    lines.append("actor_rollout_ref.model.init=random")
    given = PythonInputs(data="builtin:arithmetic-rl", reward=reward)
    assert (
        read("grpo", [*lines, *to_lines(overrides)], given, None).config.custom_reward_function.path
        is not None
    )


@pytest.mark.parametrize(
    "key", ["custom_reward_function.path", "data.system_prompt", "trainer.total_training_steps"]
)
def test_none_as_python_writes_it_is_null(key):
    assert flatten(load_config("grpo", [*to_lines(OPEN), f"{key}=None"]).config)[key] is None
