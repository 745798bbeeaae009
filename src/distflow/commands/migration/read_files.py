"""A file of another system, whatever it is: a Python script, commands of the shell, or YAML."""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from distflow.commands.migration.python_scripts import METHODS, read_script
from distflow.commands.migration.yaml_and_shell import (
    ForeignSettings,
    ShellScript,
    Unread,
    identify,
    method_of,
    read_options,
)
from distflow.config.compose.setting_origins import preset_names
from distflow.config.compose.typed_values import nested
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError, missing_path
from distflow.untrusted_files import MAX_YAML_BYTES, load_yaml, read_file

_TRAINER = re.compile(
    r"openrlhf\.cli\.train_(?P<OpenRLHF>\w+)|(?:verl|siirl|recipe)[\w./]*[./](?P<verl>main_(?!gen|eval)\w+|\w*(?:async_main|sft_trainer))(?:\.py)?"
    r"|(?:.*/)?(?P<TRL>trl)(?:\.scripts\.\w+)?|(?P<script>.*\.py)"
)
_METHODS = {"ppo_ray": "", "ppo": "ppo", "sft": "sft", "rm": "rm"} | {name.lower(): METHODS[name] for name in METHODS}
_SHOWN = re.compile(r"(?m)^((?:[^\n]*\\\n)*[^\n]*?)\.py((?:[ \t]*\\\n|[ \t]+-)(?:[^\n]*\\\n)*[^\n]*)")
"""A command that a script shows: what starts the script, and its options."""
_PROCESSES = re.compile(r"--(?:num_processes|(?P<node>nproc[_-]per[_-]node|num_gpus))[= ](?P<count>\d+)")
_MACHINES = re.compile(r"--(?:num_machines|nnodes|num_nodes)[= ](\d+)")


def read_foreign(path: Path, devices: int | None = None) -> ForeignSettings:
    """devices: that it trains on, as `--devices` says. Raises UserError that names the file, and what is wrong."""
    try:
        return _read(path, devices=devices)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be migrated: it is not a text file") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} cannot be migrated: it is not valid YAML: {error}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: {'; '.join(missing_path(path))}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path} cannot be migrated: {error}") from error


_NO_SETTINGS = {".ipynb": "it is a notebook: `jupyter nbconvert --to script` makes a script of it, to be migrated"} | (
    dict.fromkeys((".jsonl", ".parquet", ".csv", ".arrow"), "it is a file of data: name it in data.train_files")
)


def _read(path: Path, arguments: Mapping[str, object] | None = None, devices: int | None = None) -> ForeignSettings:
    if path.suffix in _NO_SETTINGS and path.is_file():
        raise UserError(_NO_SETTINGS[path.suffix])
    text = read_file(path, max_bytes=MAX_YAML_BYTES).decode("utf-8")
    if "\0" in text or not text.strip():
        raise UserError("it is not a text file" if text.strip() else "it is empty")
    if path.suffix == ".py":
        return _read_python(text, arguments, devices)
    if path.suffix not in (".yaml", ".yml"):
        return _read_shell(text, path.parent, devices)
    values = load_yaml(text)
    if not isinstance(values, dict):
        raise UserError("it is not a mapping of keys")
    if (path.parent / "run.json").is_file() or _is_ours(values):
        raise UserError(f"it is a config of distflow already: distflow config {path} shows it whole")
    return identify(values)


def _is_ours(values: Mapping[str, object]) -> bool:
    """Whether it builds on a preset of ours."""
    defaults = values.get("defaults")
    return isinstance(defaults, list) and any(name in preset_names() for name in defaults)


def _read_python(text: str, arguments: Mapping[str, object] | None, devices: int | None) -> ForeignSettings:
    """Without a command, the first that the script shows is read if its options are TRL's."""
    if arguments is not None or not re.search(r"\b(?:TrlParser|HfArgumentParser)\(", text):
        return read_script(text, arguments or {}, devices)
    shown = _SHOWN.search(re.sub(r"(?m)^[ \t]*#[ \t]?", "", text))
    options: dict[str, object] = {}
    for words, _ in ShellScript("x" + shown[2]).commands[:1] if shown else ():
        read_options(words, options.__setitem__)
    own = _num_processes(shown[1] if shown else "")
    found = read_script(text, options, devices or own)
    found.remarks += ["the options are those of the first command in the script"] if options else []
    found.devices = own
    return found


def _num_processes(launcher: str) -> int | None:
    """Of `accelerate launch`, on all machines, or of `torchrun`, on each; None if it does not say."""
    found = _PROCESSES.search(launcher)
    return int(found["count"]) * (_num_machines(launcher) if found["node"] else 1) if found else None


def _num_machines(launcher: str) -> int:
    found = _MACHINES.search(launcher)
    return int(found[1]) if found else 1


def _read_shell(text: str, folder: Path, devices: int | None) -> ForeignSettings:
    script = ShellScript(text, str(folder))
    found = [each for words, line in script.commands if (each := _read_command(words, line, folder, devices))]
    if not found:
        values: dict[str, object] = {}
        for words, _ in script.commands:
            read_options(words, values.__setitem__)
        if not values:
            raise UserError("no command in it trains with TRL, OpenRLHF, verl, ROLL or AReaL, and no line is key=value")
        found = [_identify_lines(values)]
    settings = found[-1]
    settings.remarks += [f"{len(found)} of its commands train; the last one is read"] if len(found) > 1 else []
    settings.remarks += script.remarks
    lines = [*enumerate(text.splitlines(), 1)]
    passed = (number for number, line in lines if re.search(r"^[^#]*[\s\"]\$\{?[@*]", line))
    settings.remarks += [f"line {number}: $@ stands for options that the file does not give" for number in passed]
    for key in settings.values:
        places = (number for number, line in lines if re.search(rf"^[^#]*(?<![\w.]){re.escape(key)}(?![\w.])", line))
        settings.lines.setdefault(key, next(places, 0))
    return settings


def _identify_lines(values: Mapping[str, object]) -> ForeignSettings:
    """The settings of `key=value`, whose keys may have dots."""
    unread = {key: value for key, value in values.items() if isinstance(value, Unread)}
    try:
        return identify(nested({key: value for key, value in values.items() if key not in unread}) | unread)
    except AttributeError as error:
        raise UserError("one of its keys is a value and a group of others") from error


def _read_command(words: list[str], line: int, folder: Path, devices: int | None) -> ForeignSettings | None:
    """What a command trains; None for one of another tool."""
    found = ((place, each) for place, word in enumerate(words) if (each := _TRAINER.fullmatch(word)))
    place, trainer = next(found, (0, None))
    own = [] if trainer is None else [*trainer[0].split(".scripts.")[1:], *words[place + 1 :], ""]
    if trainer is None or trainer["TRL"] and place and own[0] not in _METHODS:  # pip install trl
        return None
    system, values, launcher = str(trainer.lastgroup), dict[str, object](), " ".join(words[:place])
    processes, machines = _num_processes(launcher), _num_machines(launcher)
    newer = all_tables()[system].newer_names if system in all_tables() else {}
    read_options(own[:-1], lambda key, value: values.__setitem__(newer.get(key, key), value))
    named = {"TRL": own[0], "verl": "ppo_ray" if "main" in trainer[0] else "sft"}.get(system, trainer[system])
    if system != "script" and named not in _METHODS:
        raise UserError(f"line {line}: '{trainer[0]}' uses an unsupported method, or does not train")
    config = values.pop("config", None) or values.pop("config_name", None)
    values.pop("config_path", None)
    if config is not None and (system != "verl" or _find(str(config), folder) is not None):
        settings = _read(_beside(str(config), folder))
        settings.values |= values
        settings.method = _METHODS.get(named, "") or settings.method
    elif system == "script":
        if not any(all_tables()["TRL"].find(key) for key in values) and _find(trainer[0], folder) is None:
            return None
        settings = _of_script(trainer[0], values, folder, devices or processes)
    else:
        settings = ForeignSettings(system, _METHODS[named] or method_of(system, values), values)
        is_default = re.fullmatch(r"(?:ppo|ppo_megatron|sft)_trainer(?:\.yaml)?", str(config))  # of the presets
        unknown = config is not None and not is_default
        settings.remarks += [f"the settings of {config}, which is not in the same folder"] if unknown else []
    settings.devices = processes
    if settings.system == "TRL" and machines > 1:
        settings.values["num_machines"] = machines
    return settings


def _find(name: str, folder: Path) -> Path | None:
    places = (folder / name, folder / Path(name).name, folder / f"{name}.yaml")
    return next((place for place in places if place.is_file()), None)


def _beside(name: str, folder: Path) -> Path:
    """The YAML file that a command names."""
    if (found := _find(name, folder)) is None:
        raise UserError(f"its settings are in {name}, which is not in the same folder: migrate that file")
    return found


def _of_script(name: str, values: dict[str, object], folder: Path, devices: int | None) -> ForeignSettings:
    if (found := _find(name, folder)) is not None:
        return _read(found, values, devices)
    kind = next((kind for kind in METHODS if kind.lower() in Path(name).stem.lower().replace("gspo", "grpo")), None)
    remarks = [f"{name} was not found; only the options of the command are read"]
    return ForeignSettings("TRL", METHODS[kind] if kind else method_of("TRL", values), values, remarks=remarks)
