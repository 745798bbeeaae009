"""A file of another system, whatever it is: a Python script, a command of the shell, or YAML."""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml

from distflow.config.migration.foreign_settings import ForeignSettings, identify, method_of
from distflow.config.migration.python_scripts import METHODS, read_script
from distflow.config.migration.shell_commands import ShellScript, Word, read_options
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError
from distflow.untrusted_files import load_yaml, read_file

_MAX_BYTES = 200_000
_PROGRAM = re.compile(
    r"openrlhf\.cli\.train_(?P<openrlhf>\w+)|(?:verl|siirl|recipe)[\w./]*[./](?P<verl>main_\w+|\w*sft_trainer)(?:\.py)?"
    r"|(?:.*/)?(?P<trl>trl)|(?P<script>.*\.py)"
)
_OF_OPENRLHF = {"ppo_ray": "", "ppo": "", "sft": "sft", "rm": "rm"}
_PROCESSES = re.compile(r"--(?:num_processes|nproc[_-]per[_-]node)(?:=(\d+))?")


def read_foreign(path: Path) -> ForeignSettings:
    """Raises UserError that names the file, and what is wrong with it."""
    try:
        data = read_file(path, max_bytes=_MAX_BYTES)
        text = data.decode("utf-8")
        if "\0" in text or not text.strip():
            raise UserError("it is empty" if not text.strip() else "it is no text")
        if path.suffix == ".py":
            return _read_python(text)
        if path.suffix in (".yaml", ".yml"):
            return _read_yaml(text)
        return _read_shell(text, path.parent)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be migrated: it is no text") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"{path} cannot be migrated: {error}") from error


def _read_yaml(text: str) -> ForeignSettings:
    try:
        values = load_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"it is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError("it is no mapping of keys")
    return identify(values)


def _read_python(text: str, arguments: Mapping[str, object] | None = None) -> ForeignSettings:
    """Of a script whose arguments are options, the first command in a comment of its own (a text by itself) is read."""
    if arguments is None and re.search(r"\b(TrlParser|HfArgumentParser)\(", text):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # `read_script` reports it
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and ".py " in str(node.value.value):
                    return _read_usage(text, str(node.value.value), node.lineno)
    return read_script(text, arguments or {})


def _read_usage(text: str, usage: str, line: int) -> ForeignSettings:
    commands = [words for words in ShellScript(usage).commands if any(word.endswith(".py") for word, _ in words)]
    options: dict[str, object] = {}
    read_options(_after_program(commands[0])[2], lambda key, value, _: options.update({key: value}))
    found = read_script(text, options)
    found.remarks.insert(0, f"the options are those of the first command in the text of line {line}")
    return found


def _after_program(words: list[Word]) -> tuple[re.Match[str] | None, list[Word], list[Word]]:
    """The program that trains, and the words before and after it."""
    for place, (word, _) in enumerate(words):
        found = _PROGRAM.fullmatch(word)
        if found is not None and (found["trl"] is None or place + 1 < len(words)):
            return found, words[:place], words[place + 1 :]
    return None, [], words


def _read_shell(text: str, folder: Path) -> ForeignSettings:
    script = ShellScript(text)
    found = [(command, each) for command in script.commands if (each := _after_program(command))[0] is not None]
    trained = [settings for _, each in found if (settings := _read_command(*each, folder)) is not None]
    if not trained:
        values: dict[str, object] = {}
        for words in script.commands:
            read_options(words, lambda key, value, _: values.update({key: value}))
        if not values:
            raise UserError("no command in it trains with TRL, OpenRLHF, verl, ROLL or AReaL, and no line is key=value")
        trained = [identify(values)]
    if len(trained) > 1:
        trained[-1].remarks.append(f"{len(trained)} commands in it train; the last is read")
    trained[-1].remarks += script.remarks
    return trained[-1]


def _read_command(
    program: re.Match[str] | None, before: list[Word], after: list[Word], folder: Path
) -> ForeignSettings | None:
    assert program is not None
    settings = ForeignSettings("TRL", "")
    read_options(after, settings.add)
    counts = [found[1] or before[place + 1][0] for place, (word, _) in enumerate(before[:-1]) if (found := _PROCESSES.fullmatch(word))]
    settings.devices = int(counts[0]) if counts and counts[0].isdecimal() else None
    if program["script"]:
        return _read_script_command(program["script"], settings, folder)
    if program["openrlhf"]:
        settings.system, settings.method = "OpenRLHF", _OF_OPENRLHF.get(program["openrlhf"], "?")
    elif program["verl"]:
        settings.system, settings.method = "verl", "sft" if "sft" in program["verl"] else ""
    else:
        names = {name.lower(): method for name, method in METHODS.items()}
        settings.method = names.get(after[0][0], "?")
    if settings.method == "?":
        raise UserError(f"'{program[0]}' trains by a method that is not there, or is no training")
    settings = _with_config(settings, folder)
    settings.method = settings.method or method_of(settings.system, settings.values)
    return settings


def _read_script_command(name: str, settings: ForeignSettings, folder: Path) -> ForeignSettings | None:
    """A command that runs a script: with a file of settings, or with options of TRL, which the script may complete."""
    if {"config", "config_name"} & settings.values.keys():
        return _with_config(settings, folder)
    known = [key for key in settings.values if all_tables()["TRL"].find(key)]
    if not known:
        return None
    place = _beside(name, folder)
    text = read_file(place, max_bytes=_MAX_BYTES).decode("utf-8", "replace") if place else ""
    if re.search(r"\w(?:Trainer|Config)\(", text):
        found = _read_python(text, settings.values)
        found.devices, found.lines = settings.devices, found.lines | settings.lines
        return found
    kinds = [each for each in METHODS if each.lower() in Path(name).stem.lower().replace("gspo", "grpo")]
    settings.method = METHODS[kinds[0]] if kinds else method_of("TRL", settings.values)
    settings.remarks.append(f"{name} is not there to be read: only the options are")
    return settings


def _with_config(settings: ForeignSettings, folder: Path) -> ForeignSettings:
    """The settings of the file that an option names, and then those of the options."""
    named = settings.values.pop("config", None) or settings.values.pop("config_name", None)
    settings.values.pop("config_path", None)
    if not isinstance(named, str):
        return settings
    place = _beside(named, folder) or _beside(f"{named}.yaml", folder)
    if place is None:
        raise UserError(f"its settings are in {named}, which is not beside it: migrate that file")
    found = _read_yaml(read_file(place, max_bytes=_MAX_BYTES).decode("utf-8", "replace"))
    found.values |= settings.values
    found.lines, found.devices, found.method = settings.lines, settings.devices, settings.method or found.method
    return found


def _beside(name: str, folder: Path) -> Path | None:
    places = (folder / name, Path(name), folder / Path(name).name)
    return next((place for place in places if place.is_file()), None)
