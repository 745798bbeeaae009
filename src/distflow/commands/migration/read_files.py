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
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be migrated: it is not a text file") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} cannot be migrated: it is not valid YAML: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} cannot be migrated: it is not valid TOML: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} cannot be migrated: its brackets are nested too deeply") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: {'; '.join(missing_path(path))}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path} cannot be migrated: {error}") from error


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
    found = [each for words in commands if (each := _read_command(words, folder))]
    if not found:
        words = [word for command in commands for word in command]
        values = {key: value for key, value in read_options(words) if key}
        if not values:
            raise UserError(
                "no command in it trains with TRL, OpenRLHF, verl, ROLL or AReaL, and no line is "
                "key=value"
            )
        found = [_identify_lines(values)]
    settings = found[-1]
    if len(found) > 1:
        settings.remarks.append(f"{len(found)} of its commands train; the last one is read")
    return settings


def _identify_lines(values: Mapping[str, object]) -> ForeignSettings:
    """The settings of `key=value`, whose keys may have dots."""
    unread = {key: value for key, value in values.items() if isinstance(value, Unread)}
    try:
        return identify(
            nested({key: value for key, value in values.items() if key not in unread}) | unread
        )
    except (AttributeError, TypeError) as error:
        raise UserError("one of its keys is a value and a group of others") from error


def _read_command(words: list[str], folder: Path) -> ForeignSettings | None:
    """What a command trains; None for one of another tool."""
    place, trainer = next(
        ((place, match) for place, word in enumerate(words) if (match := _TRAINER.fullmatch(word))),
        (0, None),
    )
    if trainer is None:
        return None
    own = [*trainer[0].split(".scripts.")[1:], *words[place + 1 :]]
    if trainer["TRL"] and place and (not own or own[0] not in _METHODS):  # pip install trl
        return None
    system = "siiRL" if trainer["siirl"] else str(trainer.lastgroup)
    values, remarks = _read_options(own, system)
    named = {"TRL": own[0] if own else "", "script": "script"}.get(system, "")
    if system in ("verl", "siiRL"):
        named = "ppo_ray" if "main" in trainer[0] else "sft"
    elif system == "OpenRLHF":
        named = trainer["OpenRLHF"]
    if system != "script" and named not in _METHODS:
        raise UserError(f"'{trainer[0]}' uses an unsupported method, or does not train")
    config = values.pop("config", None) or values.pop("config_name", None)
    is_of_verl = system in ("verl", "siiRL")
    if config is not None and (not is_of_verl or _find(str(config), folder) is not None):
        settings = _read(_beside(str(config), folder))
        settings.values |= values
        settings.method = _METHODS.get(named, "") or settings.method
    elif system == "script":
        if not any(all_tables()["TRL"].find(key) for key in values):
            return None
        settings = _of_script(trainer[0], values)
    else:
        settings = ForeignSettings(system, _METHODS[named] or method_of(system, values), values)
        # of the presets
        is_default = re.fullmatch(r"(?:ppo|ppo_megatron|sft)_trainer(?:\.yaml)?", str(config))
        if config is not None and not is_default:
            remarks.append(f"the settings of {config}, which is not in the same folder")
    settings.remarks += remarks
    for key, value in read_options(words[:place]):  # of accelerate or torchrun
        if key in _NUMBERS_OF_PROCESSES and isinstance(value, int):
            settings.devices = value
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


def _of_script(name: str, values: dict[str, object]) -> ForeignSettings:
    """The options of a command that runs a script of the user's own."""
    stem = Path(name).stem.lower().replace("gspo", "grpo")
    method = next((method for word, method in _METHODS.items() if method and word in stem), None)
    remarks = [f"{name} is not read: only the options of the command are"]
    return ForeignSettings("TRL", method or method_of("TRL", values), values, remarks=remarks)
