"""A value's name in another system or paper is answered with its name here."""

import pytest

from distflow.builtin_names import PIPELINES, REWARDS
from distflow.config import load_config
from distflow.config.keys.schema import schema_keys
from distflow.config.migration.tables import _synonyms, find_synonyms, split_overrides
from distflow.errors import UserError

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        (f"{ACTOR}.policy_loss=ppo", "vanilla"),
        (f"{ACTOR}.policy_loss=PPO", "vanilla"),
        (f"{ACTOR}.policy_loss=geo_mean", "gmpo"),
        (f"{ACTOR}.policy_loss=vanila", "vanilla"),
        ("algorithm.adv_estimator=ppo", "gae"),
        ("algorithm.adv_estimator='reinforce++'", "reinforce_plus_plus"),
        ("algorithm.adv_estimator=group_norm", "grpo"),
        (
            "algorithm.adv_estimator=dr_grpo",
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false",
        ),
        ("actor_rollout_ref.rollout.name=transformers", "hf"),
        (f"{ACTOR}.strategy=deepspeed", "fsdp"),
        (f"{ACTOR}.optim.optimizer=adam", "adamw"),
        (f"{ACTOR}.optim.scheduler=cosine", "cosine_with_warmup"),
        (f"{ACTOR}.kl_loss_type=k3", "low_var_kl"),
        ("actor_rollout_ref.model.dtype=bf16", "bfloat16"),
        ("data.prompt_format=messages", "chat"),
        ("reward.functions={default: [accuracy]}", "math"),
        ("dag.pipeline=drgrpo", "grpo"),
        ("trainer.allocation=deepspeed[actor]:d2", "'fsdp'"),
    ],
)
def test_another_systems_value_is_answered_with_ours(override: str, meant: str) -> None:
    from distflow.planning.allocation_expression import follow_allocation

    with pytest.raises(UserError) as error:
        follow_allocation(load_config("grpo", [override], complete=False))
    assert f"did you mean {meant}?" in str(error.value)


def test_a_domains_algorithm_is_answered_too() -> None:
    domains = "algorithm.domains={code: {policy_loss: ppo}}"
    keys = ["data.domains={code: {train_files: [x.jsonl]}}", domains]
    with pytest.raises(
        UserError, match=r"algorithm\.domains\.code\.policy_loss[^→]*→ .* vanilla\?"
    ):
        load_config("rlvr", keys, complete=False)


def test_every_synonym_leads_to_what_exists_and_is_no_name_of_ours() -> None:
    keys = schema_keys()
    for (key, word), meant in _synonyms().items():
        choices = {"dag.pipeline": PIPELINES, "reward.functions": REWARDS}.get(key) or keys[
            key
        ].spec.choices
        assert word not in choices, (key, word)

        for each in meant:
            overrides = split_overrides(each) if "=" in each else {key: each}
            assert all(own in keys for own in overrides) and overrides[key] in choices, (key, word)

        assert find_synonyms(key, word, choices)
