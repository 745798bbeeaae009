"""Files of other systems become configs that train the same: sizes are worked out by hand, and what
cannot be carried over is named."""

from pathlib import Path

import pytest
import yaml

from distflow.commands.migration.conversion import as_file, compose, convert
from distflow.commands.migration.read_files import read_foreign
from distflow.commands.migration.settings import ForeignSettings
from distflow.config import flatten, load_config, preset_config
from distflow.config.migration import tables
from tests.commands.migration.test_settings import as_yaml

FILES = Path(__file__).parent / "files"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
# devices that are asked for, preset, what the config sets, what is said of what is missing
CONFIGS = yaml.safe_load(Path(__file__).with_name("files.yaml").read_text())
MAPS = {"reward.functions", "data.domains"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_becomes_a_config_and_what_is_missing_is_named(name, tmp_path):
    case = CONFIGS[name]
    wanted = case["sets"]
    preset = case["preset"]
    draft = convert(read_foreign(FILES / name), case["devices"])
    path = tmp_path / "migrated.yaml"
    path.write_text(yaml.safe_dump(as_file(draft, compose(draft))))
    for part in case["says"]:
        assert any(part in line for line in draft.missing), (part, draft.missing)
    assert len(draft.missing) <= len(case["says"]) + 1, draft.missing
    plain = yaml.safe_load(path.read_text())
    assert plain["defaults"] == [preset, "_self_"]
    base = flatten(preset_config(preset))
    found = flatten(load_config(str(path), complete=False).config)

    for key in MAPS & wanted.keys():
        group, entry = key.split(".")
        assert plain[group][entry] == wanted[key]

    by_hand = {key: value for key, value in wanted.items() if key not in MAPS}
    assert as_yaml({key: found[key] for key in by_hand}) == by_hand
    assert {key for key, value in found.items() if value != base[key]} <= wanted.keys() | MAPS, (
        "nothing else differs"
    )


MODEL_PATH = f"{MODEL}.path"


def test_the_address_of_a_server_is_no_file(tmp_path):
    (tmp_path / "x.sh").write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d/d "
        "--remote_rm_url http://localhost:5000/get\n"
    )
    draft = convert(read_foreign(tmp_path / "x.sh"), None)
    assert "custom_reward_function.path" not in draft.overrides
    assert any(
        "remote_rm_url=http://localhost:5000/get: it must be a Python file" in line
        for line in draft.missing
    )


def vanished(system: str, method: str, key: str, value: object) -> bool:
    """Whether a key that stands alone in a file is neither in the config nor said."""
    draft = convert(ForeignSettings(system, method, {key: value}), 1)
    said = "\n".join([*draft.missing, *draft.without_effect])
    return key not in said and not draft.given


ALONE = [
    (system, key.replace("*", "thing"))
    for system in tables.SYSTEMS
    for key in (*tables.table_of_runs(system).names, "made.up", "no_made_up")
]


@pytest.mark.parametrize("value", [True, 0.5, "word", None, {}], ids=str)
def test_no_key_vanishes(value):
    """One of twenty keys of the tables."""
    lost = [each for each in ALONE[::20] if vanished(each[0], "grpo", each[1], value)]
    assert not lost


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo", "sft"])
def test_no_key_of_a_table_vanishes(method):
    lost = [each for each in ALONE if vanished(each[0], method, each[1], 1)]
    assert not lost


SHARES = {
    "TRL": ("grpo", {"use_vllm": True, "vllm_gpu_memory_utilization": 0.3}),
    "OpenRLHF": ("grpo", {"vllm_num_engines": 2, "vllm_gpu_memory_utilization": 0.3}),
    "verl": ("ppo", {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": 0.3}),
    "siiRL": ("grpo", {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.gpu_memory_utilization": 0.3}),
    "AReaL": ("grpo", {"vllm.gpu_memory_utilization": 0.3}),
    "ROLL": (
        "grpo",
        {
            "actor_infer.strategy_args.strategy_name": "vllm",
            "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": 0.3,
        },
    ),
}


@pytest.mark.parametrize("system", SHARES)
def test_the_share_of_memory_of_a_server_is_kept(system):
    method, values = SHARES[system]
    draft = convert(ForeignSettings(system, method, values), 1)
    assert draft.overrides[f"{ROLLOUT}.engine_kwargs.vllm.gpu_memory_utilization"] == "0.3"


def test_a_share_of_memory_without_a_server_is_said():
    draft = convert(ForeignSettings("TRL", "grpo", {"vllm_gpu_memory_utilization": 0.3}), 1)
    assert any("vllm_gpu_memory_utilization=0.3" in line for line in draft.without_effect)


def test_another_strategy_than_that_of_the_file_is_said():
    draft = convert(ForeignSettings("verl", "grpo", {f"{ACTOR}.strategy": "megatron"}), 2)
    assert any(line.startswith(f"{ACTOR}.strategy=megatron") for line in draft.missing)


def test_a_later_key_for_the_same_setting_is_said():
    draft = convert(ForeignSettings("TRL", "grpo", {"model": "a", "model_name_or_path": "b"}), 1)
    assert draft.overrides[MODEL_PATH] == "b" and any(
        f"{MODEL_PATH}=a" in line for line in draft.missing
    )


@pytest.mark.parametrize("kind", ["embodied", "EMBODIED"])
def test_a_policy_that_acts_comes_from_siirl(kind, tmp_path):
    (tmp_path / "x.sh").write_text(
        f"python3 -m siirl.main_dag algorithm.workflow_type={kind} {MODEL_PATH}=m "
        "data.dataset_type=embodied "
        "actor_rollout_ref.embodied.action_token_len=7 actor_rollout_ref.embodied.env.num_envs=16 "
        "actor_rollout_ref.embodied.env.env_type=libero "
        "algorithm.embodied_sampling.filter_accuracy=True\n"
    )
    theirs = read_foreign(tmp_path / "x.sh")
    assert (theirs.system, theirs.method) == ("siiRL", "grpo")
    draft = convert(theirs, 1)
    found = flatten(compose(draft).config)
    assert found["dag.pipeline"] == "embodied_srpo" and found[f"{ROLLOUT}.workflow"] == "simulator"
    assert found["embodied_sampling.filter_accuracy"] is True
    assert found[f"{ROLLOUT}.workflow_kwargs"] == {"actions": {"action_dim": 7}, "num_workers": 16}
    assert any("env.env_type=libero" in line and "docs/acting.md" in line for line in draft.missing)


def test_a_config_of_siirl_is_told_by_its_own_keys(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "algorithm: {adv_estimator: grpo, workflow_type: dapo}\n"
        "actor_rollout_ref: {rollout: {n: 4}, model: {path: m}}\n"
    )
    theirs = read_foreign(tmp_path / "x.yaml")
    assert (
        theirs.system == "siiRL"
        and flatten(compose(convert(theirs, 1)).config)["dag.pipeline"] == "dapo"
    )


@pytest.mark.parametrize("name", ["dapo", "DAPO", "embodied", "default"])
def test_a_workflow_type_may_have_small_letters(name):
    found = load_config(
        "grpo", ["dag.pipeline=null", f"algorithm.workflow_type={name}"], complete=False
    ).config
    assert found.algorithm.workflow_type == name.upper()
