"""A setting of a command or of a YAML file keeps its meaning, or is named."""

from pathlib import Path

import pytest
import yaml

from distflow.commands.migration.conversion import compose, convert
from distflow.commands.migration.read_files import read_foreign
from distflow.config import flatten

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VERL = f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet {MODEL}.path=m "


PPO = f"{VERL} algorithm.adv_estimator=gae critic.model.path=m "


ROLL = (
    "pretrain: m\nrollout_batch_size: 8\nnum_return_sequences_in_group: 8\nactor_train: "
    "{device_mapping: 'list(range(0,16))', data_args: {file_name: [a.jsonl], "
    "domain_interleave_probs: {a: 0.5}}}\n"
)


OFTEN = (
    "rewards and columns: AReaL",
    "rewards: a function is chosen",
    "rewards: data.domains has",
    "allocation_mode=",
    "actor_train.data_args.domain_interleave_probs",
    "device_mapping: ",
    "algorithm.kl_ctrl.",
)


# name: the file by its kind, what the config sets, what is said of what is missing
READ = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text())


def as_yaml(value: object) -> object:
    """With lists in place of tuples."""
    if isinstance(value, dict):
        return {key: as_yaml(each) for key, each in value.items()}

    return [as_yaml(each) for each in value] if isinstance(value, list | tuple) else value


def migrated(folder: Path, suffix: str, text: str) -> tuple[dict[str, object], list[str]]:
    (folder / f"x.{suffix}").write_text(text)
    draft = convert(read_foreign(folder / f"x.{suffix}"), None)
    return flatten(compose(draft).config), draft.missing


@pytest.mark.parametrize("name", READ)
def test_a_setting_keeps_its_meaning_or_is_named(name, tmp_path):
    case = READ[name]
    suffix = next(iter(case))
    found, missing = migrated(tmp_path, suffix, case[suffix])
    said = case.get("says", ())
    assert as_yaml({key: found[key] for key in case["sets"]}) == case["sets"]
    for part in said:
        assert any(part in line for line in missing), (part, missing)
    unsaid = [line for line in missing if not any(part in line for part in said)]
    assert not [line for line in unsaid if not line.startswith(OFTEN)]


def test_a_reward_model_alone_is_the_score_as_in_verl(tmp_path):
    found, missing = migrated(
        tmp_path, "sh", PPO + "reward_model.enable=True reward_model.model.path=r/m"
    )
    functions = found["reward.functions"]
    assert isinstance(functions, dict)
    assert [(part.name, part.weight) for part in functions["default"]] == [("math", 0.0)]
    assert found["reward_model.model.path"] == "r/m" and not missing
