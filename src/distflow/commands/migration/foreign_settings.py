"""Settings of another system, wherever they stand; those of YAML, or of any file of keys and values, are read here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distflow.config.compose.composition import check_interpolations
from distflow.config.compose.origins import settings_of_value
from distflow.config.compose.unknown_keys import is_known
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError

_LEAST_KNOWN = 0.5  # of a file's keys; with fewer it is another tool's, or of a version that the tables do not have
_NUMBERS_OF_RANGE = re.compile(r"list\(range\((\d+), ?(\d+)\)\)")
_ESTIMATORS = ("algorithm.adv_estimator", "adv_estimator", "advantage_estimator")


@dataclass(frozen=True)
class Unread:
    """In place of a value that the file does not say: why."""

    why: str


@dataclass
class ForeignSettings:
    """method: grpo (any without a critic), ppo, sft or rm. lines: of keys, where known. remarks: what else is to be
    said of the file. devices: that it trains on, if it says so."""

    system: str
    method: str
    values: dict[str, object] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    devices: int | None = None

    def add(self, key: str, value: object, line: int) -> None:
        self.values[key], self.lines[key] = value, line


def scalar(text: str) -> object:
    """A value as the command lines of all systems have it: null, a Boolean, a number, a list of these, or a text."""
    word = text.strip()
    if word.lower() in ("none", "null", "true", "false"):
        return {"true": True, "false": False}.get(word.lower())
    if word.startswith("[") and word.endswith("]"):
        return [scalar(part.strip(" '\"")) for part in word[1:-1].split(",") if part.strip()]
    if numbers := _NUMBERS_OF_RANGE.fullmatch(word):  # as ROLL names devices
        return [*range(int(numbers[1]), min(int(numbers[2]), 10_000))]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return text


def identify(values: dict[str, object]) -> ForeignSettings:
    """The settings of a file that has only keys and values, told by the keys. Raises UserError for no system's."""
    try:
        check_interpolations(values)
    except ValueError as error:
        raise UserError(str(error)) from error
    tree = OmegaConf.create(values)
    keys = [each.key for name in values for each in settings_of_value(str(name), values[name], "") if not each.is_group]
    read = {key: _value(tree, key) for key in keys if not key.startswith(("defaults", "hydra"))}
    if not any(key.startswith("actor.") for key in read) and "model.optimizer.lr" in read:  # AReaL's fine-tuning
        read = {re.sub(r"^model\.", "actor.", key): value for key, value in read.items()}
    tables = all_tables()
    known = {name: sum(tables[name].find(key) is not None for key in read) for name in tables}
    known["verl"] += sum(tables["verl"].find(key) is None and is_known(key) for key in read)
    system = max(known, key=lambda name: known[name])
    if known[system] < _LEAST_KNOWN * len(read) or not read:
        raise UserError(
            f"{known[system]} of its {len(read)} keys are keys of {system}, and fewer are keys of another system: "
            "it is not a config of TRL, OpenRLHF, verl, ROLL or AReaL, or one of an unknown version"
        )
    return ForeignSettings(system, method_of(system, read), read)


def _value(tree: object, key: str) -> object:
    try:
        found = OmegaConf.select(tree, key)  # type: ignore[arg-type]  # what `create` made of a mapping is one
    except OmegaConfBaseException as error:
        return Unread(str(error).splitlines()[0])
    value = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    return scalar(value) if isinstance(value, str) else value


def method_of(system: str, values: Mapping[str, object]) -> str:
    """What the settings train, where nothing but they tells it."""
    if system == "TRL":
        is_rl = any(key in values for key in ("num_generations", "max_completion_length", "reward_funcs", "beta"))
        return "grpo" if is_rl else "ppo" if "num_ppo_epochs" in values else "sft"
    rollout = {"verl": "actor_rollout_ref.", "ROLL": "rollout_batch_size", "AReaL": "gconfig."}.get(system, "")
    if not any(key.startswith(rollout) for key in values):
        return "sft"
    by_default = "" if system == "AReaL" and "critic.path" not in values else "gae"
    estimator = next((values[key] for key in _ESTIMATORS if key in values), by_default)
    return "ppo" if estimator == "gae" else "grpo"
