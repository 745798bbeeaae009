"""Settings of another system as a file of its users has them, whatever the file is; those of YAML are read here."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from distflow.config.compose.unknown_keys import is_known
from distflow.config.keys.declare import dotted
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError

_LONGEST = 10_000
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_LEAST_KNOWN = 0.5  # of a file's keys; with fewer it is another program's, or of a version that the tables do not have


@dataclass(frozen=True)
class Unread:
    """In place of a value that the file does not say: why."""

    why: str


@dataclass
class ForeignSettings:
    """method: grpo (any without a critic), ppo, sft or rm. lines: of keys, where known. remarks: what else is to be said
    of the file. devices: that it trains on, if it says so."""

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
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return text


def identify(values: Mapping[str, object]) -> ForeignSettings:
    """The settings of a file that holds nothing but them, told by their keys. Raises UserError where they are those of none."""
    flat = dict(_flatten(values, ""))
    resolved: dict[str, object] = {}
    read = {key: _resolve(key, flat, resolved) for key in flat if not key.startswith(("defaults", "hydra"))}
    if not any(key.startswith("actor.") for key in read) and "model.optimizer.lr" in read:  # AReaL's fine-tuning
        read = {re.sub(r"^model\.", "actor.", key): value for key, value in read.items()}
    known = {system: sum(_has(system, key) for key in read) for system in ("verl", "TRL", "AReaL", "OpenRLHF", "ROLL")}
    system = max(known, key=lambda name: known[name])
    if not read or known[system] < _LEAST_KNOWN * len(read):
        raise UserError(
            f"{known[system]} of its {len(read)} keys are known as those of {system}, and fewer as those of another "
            "system: it is no config of TRL, OpenRLHF, verl, ROLL or AReaL, or of a version that is unknown here"
        )
    return ForeignSettings(system, method_of(system, read), read)


def method_of(system: str, values: Mapping[str, object]) -> str:
    """What the settings train, where nothing but they tells it."""
    markers = {"verl": "actor_rollout_ref.", "ROLL": "rollout_batch_size", "AReaL": "gconfig."}
    if system == "TRL":
        if any(key in values for key in ("num_generations", "max_completion_length", "reward_funcs", "loss_type")):
            return "grpo"
        return "ppo" if "num_ppo_epochs" in values else "sft"
    if system in markers and not any(key.startswith(markers[system]) for key in values):
        return "sft"
    estimator = values.get("algorithm.adv_estimator", values.get("adv_estimator", values.get("advantage_estimator")))
    if estimator is None:
        estimator = "" if system == "AReaL" and "critic.path" not in values else "gae"
    return "ppo" if estimator == "gae" else "grpo"


def _has(system: str, key: str) -> bool:
    return all_tables()[system].find(key) is not None or (system == "verl" and is_known(key))


def _flatten(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, dotted(prefix, str(name)))
        else:
            yield dotted(prefix, str(name)), scalar(value) if isinstance(value, str) else value


def _resolve(key: str, flat: Mapping[str, object], resolved: dict[str, object]) -> object:
    """The value with the `${other.key}` in it replaced; what refers to itself, a group or a function is unread."""
    if key in resolved:
        return resolved[key]
    value = flat.get(key, Unread("it refers to what the file does not hold"))
    resolved[key] = Unread("it refers to itself")
    if isinstance(value, str):
        names = _REFERENCE.findall(value)
        found = {name: _resolve(name, flat, resolved) for name in names}
        if names and value == f"${{{names[0]}}}":
            value = found[names[0]]
        elif unread := [each for each in found.values() if isinstance(each, Unread)]:
            value = unread[0]
        else:
            value = _REFERENCE.sub(lambda match: str(found[match[1]]), value)
        if len(str(value)) > _LONGEST:
            value = Unread("it is too long")
    resolved[key] = value
    return value
