"""Whatever value a key has, a config is accepted or refused with a message that names the key; no
rule computes on a value that was refused."""

import os
from collections.abc import Iterator, Mapping

import pytest

from distflow.config import ConfigError, config_from_dict, load_config
from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
from distflow.config.compose.typed_values import nested
from distflow.config.keys.schema import schema_keys
from tests.sparse_params import BY_HAND, one_fast_in

ODD = (None, "nonsense", 0, -1, 2**63 - 1, 10**400, [], {"a": {}})
ROLLOUT = "actor_rollout_ref.rollout"
AROUND: dict[str, dict[str, object]] = {
    "one policy": {
        "trainer.total_training_steps": 10,
        "algorithm.adv_estimator": "gae",
        "dag.pipeline": "ppo",
    },
    "policies of agents": {
        **{"trainer.total_training_steps": 10, f"{ROLLOUT}.workflow": "multi_turn"},
        f"{ROLLOUT}.agents": {"a": {}, "b": {"policy": "other"}},
        "dag.policies": {"other": {"model": {"path": "model"}}},
    },
    "domains": {
        "data.domains": {
            "a": {"train_files": "a.jsonl", "reward": "math"},
            "b": {"train_files": "b.jsonl", "n": 2},
        },
        **{"algorithm.domains": {"a": {"adv_estimator": "rloo"}}, "trainer.launcher": "ray"},
    },
}
GOOD = {
    "actor_rollout_ref.model.path": "model",
    "data.train_files": "train.jsonl",
    "data.train_max_samples": 100,
}


def wrong_values(key: str) -> Iterator[object]:
    spec = schema_keys()[key].spec
    yield from ODD
    yield from (bound - 1 for bound in (spec.minimum, spec.above) if bound is not None)
    yield from (bound + 1 for bound in (spec.maximum, spec.below) if bound is not None)


def refused(values: Mapping[str, object]) -> ConfigError | None:
    try:
        config_from_dict(nested(values))
    except ConfigError as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("around", one_fast_in(3, AROUND.values(), others=BY_HAND), ids=AROUND)
def test_every_key_takes_odd_values_or_is_named(around):
    for key in schema_keys():
        for value in wrong_values(key):
            if (error := refused({**GOOD, **around, key: value})) is not None:
                named = [subject for problem in error.problems for subject, _ in problem.places]
                assert named, f"{key}={value!r}: {error}"


def test_a_size_of_zero_is_one_problem():
    for key in ("actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size"):
        error = refused({**GOOD, "trainer.total_training_steps": 10, key: 0})
        assert error is not None and [each.places[0][0] for each in error.problems] == [key], error


def test_an_engine_that_does_not_exist_is_named_beside_policies_of_agents():
    with pytest.raises(ConfigError, match=r"rollout\.name[^\n]*\n[^\n]*'vlm', "):
        config_from_dict(nested({**GOOD, **AROUND["policies of agents"], f"{ROLLOUT}.name": "vlm"}))


@pytest.mark.parametrize(
    "key",
    (
        *(
            "data.train_files",
            "data.val_files",
            "actor_rollout_ref.model.path",
            "trainer.resume_mode",
        ),
        *("custom_reward_function.path", "actor_rollout_ref.model.tokenizer_path"),
    ),
)
def test_a_path_that_the_system_refuses_is_named(key):
    with pytest.raises(ConfigError, match=rf"(?m)^  {key}") as found:
        load_config("grpo", [f"{key}={'x' * 300}/x"], complete=False, needed=NEEDED_TO_TRAIN)
    assert "xxx/x" in str(found.value) or key == "trainer.resume_mode"


def test_a_home_of_nobody_is_named():
    with pytest.raises(ConfigError, match="data.train_files = '~nobody-at-all/x.jsonl'"):
        load_config(
            "grpo",
            ["data.train_files=~nobody-at-all/x.jsonl"],
            complete=False,
            needed=NEEDED_TO_TRAIN,
        )


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_in_a_folder_of_somebody_else_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(ConfigError, match="Permission denied"):
        load_config(
            "grpo",
            [f"data.train_files={tmp_path}/closed/x.jsonl"],
            complete=False,
            needed=NEEDED_TO_TRAIN,
        )


def test_a_preset_with_an_endless_name_is_one_message():
    with pytest.raises(ConfigError, match="File name too long"):
        load_config("x" * 300)
