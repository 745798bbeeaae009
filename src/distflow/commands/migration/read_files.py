"""A file of another system: YAML, JSON, TOML, or the options of commands."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import yaml

from distflow.commands.migration.flags import read_options, split_commands
from distflow.commands.migration.settings import ForeignSettings, Unread, identify, method_of
from distflow.config.compose.setting_origins import preset_names
from distflow.config.compose.typed_values import nested
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError, joined, missing_path
from distflow.untrusted_files import MAX_YAML_BYTES, load_yaml, read_file

_TRAINER = re.compile(
    r"openrlhf\.cli\.train_(?P<OpenRLHF>\w+)|(?:(?P<siirl>siirl)|verl|recipe)[\w./]*[./]"
    r"(?P<verl>main_(?!gen|eval)\w+|\w*(?:async_main|sft_trainer))(?:\.py)?"
    r"|(?:.*/)?(?P<TRL>trl)(?:\.scripts\.\w+)?|(?P<script>.*\.py)"
)
_METHODS = {
    "grpo": "grpo",
    "rloo": "rloo",
    "ppo_ray": "",
    "ppo": "ppo",
    "sft": "sft",
    "reward": "rm",
    "rm": "rm",
}
"""What trainers are called, and what they train; the settings say it of an empty one."""
_CODE = (
    "code is not read: write its settings into a file of options, --learning_rate=1e-6, or of "
    "keys, as YAML"
)
_DATA = "it is a file of data: name it in data.train_files"
_NO_SETTINGS = {
    ".py": _CODE,
    ".ipynb": _CODE,
    ".jsonl": _DATA,
    ".parquet": _DATA,
    ".csv": _DATA,
    ".arrow": _DATA,
}
_NUMBERS_OF_PROCESSES = ("num_processes", "nproc_per_node")
_CONFIGS = (".yaml", ".yml", ".json", ".toml")


def read_foreign(path: Path) -> ForeignSettings:
    """Raises UserError that names the file, and what is wrong."""
    try:
        return _read(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: {'; '.join(missing_path(path))}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UserError as error:
        why = str(error)
    except UnicodeDecodeError:
        why = "it is not a text file"
    except RecursionError:
        why = "its brackets are nested too deeply"
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        why = f"it is not valid {path.suffix[1:].upper()}: {error}"

    raise UserError(f"{path} cannot be migrated: {why}")


def _read(path: Path) -> ForeignSettings:
    if path.suffix in _NO_SETTINGS and path.is_file():
        raise UserError(_NO_SETTINGS[path.suffix])

    text = read_file(path, max_bytes=MAX_YAML_BYTES).decode("utf-8")
    if "\0" in text or not text.strip():
        raise UserError("it is not a text file" if text.strip() else "it is empty")
    if path.suffix in _CONFIGS:
        return _read_config(path, text)

    return _read_commands(text, path.parent)


def _read_config(path: Path, text: str) -> ForeignSettings:
    values = tomllib.loads(text) if path.suffix == ".toml" else load_yaml(text)
    if not isinstance(values, dict):
        raise UserError("it is not a mapping of keys")
    if (path.parent / "run.json").is_file() or _is_ours(values):
        raise UserError(
            f"it is a config of distflow already: distflow config {path} shows it whole"
        )

    return identify(values)


def _is_ours(values: Mapping[str, object]) -> bool:
    """Whether it builds on a preset of ours."""
    defaults = values.get("defaults")
    return isinstance(defaults, list) and any(name in preset_names() for name in defaults)


def _read_commands(text: str, folder: Path) -> ForeignSettings:
    commands = split_commands(text)
    found = []
    for words in commands:
        if settings := _read_command(words, folder):
            found.append(settings)

    if found:
        if len(found) > 1:
            found[-1].remarks.append(f"{len(found)} of its commands train; the last one is read")
        return found[-1]

    values: dict[str, object] = {}
    for words in commands:
        for key, value in read_options(words):
            if key:
                values[key] = value

    if not values:
        raise UserError(
            "no command in it trains with TRL, OpenRLHF, verl, ROLL or AReaL, and no line is "
            "key=value"
        )

    return _identify_lines(values)


def _identify_lines(values: Mapping[str, object]) -> ForeignSettings:
    """The settings of `key=value`, whose keys may have dots."""
    unread = {key: value for key, value in values.items() if isinstance(value, Unread)}
    given = {key: value for key, value in values.items() if key not in unread}
    try:
        return identify(nested(given) | unread)
    except (AttributeError, TypeError) as error:
        raise UserError("one of its keys is a value and a group of others") from error


def _read_command(words: list[str], folder: Path) -> ForeignSettings | None:
    """What a command trains; None for one of another tool."""
    found = [(place, match) for place, match in enumerate(map(_TRAINER.fullmatch, words)) if match]
    if not found:
        return None

    place, trainer = found[0]
    own = [*trainer[0].split(".scripts.")[1:], *words[place + 1 :]]
    if trainer["TRL"] and place and (not own or own[0] not in _METHODS):  # pip install trl
        return None

    system = "siiRL" if trainer["siirl"] else str(trainer.lastgroup)
    values, remarks = _read_options(own, system)

    if system == "script":
        settings = _of_script(trainer[0], values, folder)
    else:
        named = _trains(trainer, own)
        if named not in _METHODS:
            raise UserError(f"'{trainer[0]}' uses an unsupported method, or does not train")
        settings = _of_trainer(system, _METHODS[named], values, folder)

    if settings is None:
        return None

    settings.remarks += remarks
    for key, value in read_options(words[:place]):  # of accelerate or torchrun
        if key in _NUMBERS_OF_PROCESSES and isinstance(value, int):
            settings.devices = value

    return settings


def _trains(trainer: re.Match[str], own: list[str]) -> str:
    """What the trainer is called, as in `_METHODS`. own: the words after it."""
    if trainer["TRL"]:
        return own[0] if own else ""
    if trainer["OpenRLHF"]:
        return trainer["OpenRLHF"]
    return "ppo_ray" if "main" in trainer[0] else "sft"


def _of_trainer(
    system: str, method: str, values: dict[str, object], folder: Path
) -> ForeignSettings:
    """The options of a trainer, on the config that they name. method: empty if settings say it."""
    config = values.pop("config", None) or values.pop("config_name", None)
    has_presets = system in ("verl", "siiRL")
    if config is not None and not (has_presets and _find(str(config), folder) is None):
        return _on_config(str(config), values, method, folder)

    settings = ForeignSettings(system, method or method_of(system, values), values)
    is_preset = re.fullmatch(r"(?:ppo|ppo_megatron|sft)_trainer(?:\.yaml)?", str(config))
    if config is not None and not is_preset:
        settings.remarks.append(f"the settings of {config}, which is not in the same folder")
    return settings


def _of_script(name: str, values: dict[str, object], folder: Path) -> ForeignSettings | None:
    """The options of a command that runs a script of the user's own; None if none is TRL's."""
    config = values.pop("config", None) or values.pop("config_name", None)
    if config is not None:
        return _on_config(str(config), values, "", folder)
    if not any(all_tables()["TRL"].find(key) for key in values):
        return None

    stem = Path(name).stem.lower().replace("gspo", "grpo")
    method = method_of("TRL", values)
    for word, meant in _METHODS.items():
        if meant and word in stem:
            method = meant
            break

    remarks = [f"{name} is not read: only the options of the command are"]
    return ForeignSettings("TRL", method, values, remarks)


def _on_config(
    config: str, values: dict[str, object], method: str, folder: Path
) -> ForeignSettings:
    """The settings of a config beside the file, and those that the command changes."""
    settings = _read(_beside(config, folder))
    settings.values |= values
    settings.method = method or settings.method
    return settings


def _read_options(words: list[str], system: str) -> tuple[dict[str, object], list[str]]:
    """The values by key, and a remark for each word that is no value of a key."""
    table = all_tables().get(system)
    newer = table.newer_names if table else {}

    values: dict[str, object] = {}
    remarks = list[str]()
    is_method = system == "TRL"  # the first word of `trl grpo`
    for key, value in read_options(words):
        name = newer.get(key, key)
        if name:
            if name in values and values[name] != value:
                remarks.append(f"{key} is given twice; the last value is read")
            values[name] = value
        elif isinstance(value, Unread):
            remarks.append(f"a word is not read: {value.why}")
        elif not is_method:
            remarks.append(f"'{value}' is not read: it is no option")

        is_method = False

    if (path := values.pop("config_path", None)) is not None:
        remarks.append(f"config_path={path}: a config is looked for in the folder of this file")
    return values, remarks


def _find(name: str, folder: Path) -> Path | None:
    places = (folder / name, folder / Path(name).name, folder / f"{name}.yaml")
    return next((place for place in places if place.is_file()), None)


def _beside(name: str, folder: Path) -> Path:
    """The config that a command names."""
    found = _find(name, folder)
    if found is None or found.suffix not in _CONFIGS:
        kinds = joined([*_CONFIGS])
        raise UserError(
            f"its settings are in {name}, which is no {kinds} in the same folder: migrate that file"
        )

    return found
