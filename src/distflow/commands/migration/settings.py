"""Settings of another system as its file has them: keys, each with a value or with why it has
none."""

import re
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
    unread = {name: value for name, value in values.items() if isinstance(value, Unread)}
    plain = {str(name): _plain(value) for name, value in values.items() if name not in unread}
    try:
        check_interpolations(plain)
        tree = OmegaConf.create(plain)
    except (ValueError, OmegaConfBaseException) as error:
        raise UserError(first_line(error)) from error
    leaves = [leaf for name, value in plain.items() for leaf in _leaves(name, value, tree)]
    if len(leaves) > _MAX_KEYS:
        raise UserError(f"it has {len(leaves):,} keys; at most {_MAX_KEYS:,} are read")
    if any(len(key) > MAX_KEY_LENGTH for key in [*unread, *dict(leaves)]):
        raise UserError(f"a key has more than {MAX_KEY_LENGTH} characters")
    of_hydra = [key for key, _ in leaves if re.match(r"(?:defaults|hydra)\b", key)]
    read = {key: value for key, value in leaves if key not in of_hydra} | unread
    # AReaL's fine-tuning
    if not any(key.startswith("actor.") for key in read) and "model.optimizer.lr" in read:
        read = {re.sub(r"^model\.", "actor.", key): value for key, value in read.items()}
    system = _system_of(read)
    found = ForeignSettings(system, method_of(system, read), read)
    found.remarks += [
        f"{key}: Hydra's own key is not read, nor are files that it names" for key in of_hydra
    ]
    return found


def _system_of(keys: Collection[str]) -> str:
    tables = all_tables()
    known = {name: sum(tables[name].find(key) is not None for key in keys) for name in tables}
    known["verl"] += sum(tables["verl"].find(key) is None and is_known(key) for key in keys)
    beside_verl = sum(
        key.startswith(_OF_SIIRL) or tables["siiRL"].find(key) is not None
        for key in keys
        if tables["verl"].find(key) is None
    )
    known["siiRL"] = known["verl"] + beside_verl if beside_verl else 0
    system = max(known, key=lambda name: known[name])
    if known[system] < _LEAST_KNOWN * len(keys) or not keys:
        raise UserError(
            f"{known[system]} of its {len(keys)} keys are keys of {system}, and fewer are keys of "
            "TRL, OpenRLHF, verl, siiRL, ROLL or AReaL: it is of another tool, or of an unknown "
            "version"
        )
    return system


def _plain(value: object) -> object:
    """As OmegaConf can have it: YAML has dates, bytes and sets besides."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | set):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


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
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
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
