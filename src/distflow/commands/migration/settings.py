"""Settings of another system as its file has them: keys, each with a value or with why it has
none."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distflow.config.compose.composition import check_interpolations
from distflow.config.compose.override_grammar import Unreadable, parse_override
from distflow.config.compose.unknown_keys import is_known
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError, first_line

# of a file's keys; with fewer it is another tool's, or of a version that the tables do not have
_LEAST_KNOWN = 0.5
_MAX_KEYS = 3000
MAX_KEY_LENGTH = 300
_NUMBERS_OF_RANGE = re.compile(r"list\(range\((\d+), ?(\d+)\)\)")
_OF_SIIRL = ("algorithm.workflow_type", "dag.")
"""Keys of siiRL that are ours too."""
_OF_RL: Mapping[str, str | tuple[str, ...]] = {
    "verl": "actor_rollout_ref.",
    "siiRL": "actor_rollout_ref.",
    "ROLL": ("actor_infer.", "rewards.", "rollout_"),
    "AReaL": ("gconfig.", "critic."),
}
"""How keys begin that only reinforcement learning has, by system; of others all files have it."""
_OF_TRLS_RL = {"num_generations", "max_completion_length", "reward_funcs", "beta"}
_ESTIMATORS = ("algorithm.adv_estimator", "adv_estimator", "advantage_estimator")


@dataclass(frozen=True)
class Unread:
    """In place of a value that the file does not say: why."""

    why: str


@dataclass
class ForeignSettings:
    """What a file sets, of which system."""

    system: str

    method: str
    """grpo (any without a critic), rloo, ppo, sft or rm."""

    values: dict[str, object] = field(default_factory=dict)

    remarks: list[str] = field(default_factory=list)
    """What else is to be said of the file."""

    devices: int | None = None
    """The processes that its launcher starts, if the command says it."""


def scalar(text: str) -> object:
    """A value as the command lines of all systems have it: null, a Boolean, a number, a list or a
    mapping of these, or a text."""
    word = text.strip()
    if word.lower() == "none":
        return None
    if numbers := _NUMBERS_OF_RANGE.fullmatch(word):  # as ROLL names devices
        return [*range(int(numbers[1]), min(int(numbers[2]), 10_000))]

    try:
        value = parse_override(f"key={word}").value
    except Unreadable:
        return text

    return text if isinstance(value, str) else value


def identify(values: dict[str, object]) -> ForeignSettings:
    """The settings of a file that has only keys and values, told by the keys. Raises UserError for
    no system's."""
    read: dict[str, object] = {}
    given: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Unread):
            read[str(name)] = value
        else:
            given[str(name)] = value

    try:
        # OmegaConf has no dates, bytes and sets, which YAML has
        plain = json.loads(json.dumps(given, default=str))
        check_interpolations(plain)
        tree = OmegaConf.create(plain)
    except (TypeError, ValueError, OmegaConfBaseException) as error:
        raise UserError(first_line(error)) from error

    remarks = []
    for name, value in plain.items():
        for key, leaf in _leaves(name, value, tree):
            if re.match(r"(?:defaults|hydra)\b", key):
                remarks.append(f"{key}: Hydra's own key is not read, nor are files that it names")
            else:
                read[key] = leaf

    if len(read) > _MAX_KEYS:
        raise UserError(f"it has {len(read):,} keys; at most {_MAX_KEYS:,} are read")
    if any(len(key) > MAX_KEY_LENGTH for key in read):
        raise UserError(f"a key has more than {MAX_KEY_LENGTH} characters")

    # AReaL's fine-tuning
    if "model.optimizer.lr" in read and not any(key.startswith("actor.") for key in read):
        read = {re.sub(r"^model\.", "actor.", key): value for key, value in read.items()}
    system = _system_of(read)

    return ForeignSettings(system, method_of(system, read), read, remarks)


def _system_of(keys: Collection[str]) -> str:
    """The system that most keys are of; verl's are siiRL's too, which has some besides."""
    known = Counter[str]()
    beside_verl = 0
    tables = all_tables()

    for key in keys:
        for name, table in tables.items():
            known[name] += table.find(key) is not None
        if tables["verl"].find(key) is None:
            known["verl"] += is_known(key)
            beside_verl += key.startswith(_OF_SIIRL) or tables["siiRL"].find(key) is not None

    known["siiRL"] = known["verl"] + beside_verl if beside_verl else 0
    system = max(known, key=lambda name: known[name])
    if known[system] < _LEAST_KNOWN * len(keys) or not keys:
        raise UserError(
            f"{known[system]} of its {len(keys)} keys are keys of {system}, and fewer are keys of "
            "TRL, OpenRLHF, verl, siiRL, ROLL or AReaL: it is of another tool, or of an unknown "
            "version"
        )

    return system


def _leaves(key: str, value: object, tree: DictConfig) -> Iterator[tuple[str, object]]:
    """The settings of a key. A section that is the interpolation of another has its settings."""
    if isinstance(value, str | list) and "${" in str(value):
        value = _resolved(tree, key)

    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(f"{key}.{name}", each, tree)
    else:
        yield key, scalar(value) if isinstance(value, str) else value


def _resolved(tree: DictConfig, key: str) -> object:
    try:
        found = OmegaConf.select(tree, key)
        if OmegaConf.is_config(found):
            return OmegaConf.to_container(found, resolve=True)
        return found
    except OmegaConfBaseException as error:
        return Unread(first_line(error))


def method_of(system: str, values: Mapping[str, object]) -> str:
    """What the settings train, where nothing but they tells it."""
    if system == "TRL":
        if not _OF_TRLS_RL.isdisjoint(values):
            return "grpo"
        return "ppo" if "num_ppo_epochs" in values else "sft"

    is_areal = system == "AReaL"
    if is_areal and values.get("actor.is_critic") is True:
        return "rm"
    if is_areal and values.get("train_dataset.type") == "rw":
        return "rm"
    if not any(key.startswith(_OF_RL.get(system, "")) for key in values):
        return "sft"

    estimator: object = "gae"
    if system == "siiRL" or (is_areal and "critic.path" not in values):
        estimator = ""
    for key in _ESTIMATORS:
        estimator = values.get(key, estimator)
    return "ppo" if estimator == "gae" else "grpo"
