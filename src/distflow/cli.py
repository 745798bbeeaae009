"""The command line: parses arguments, runs a command, and turns an error into a message and an exit
status."""

import argparse
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from distflow import __version__
from distflow.observe.sanitized_output import quiet_libraries, sanitized_output
from distflow.runtime.stop_signals import (
    Interrupted,
    ended_by,
    exit_status,
    interruptible,
    leave_at_once,
)

USER_FAULT = 2
OUR_FAULT = 1


class Command(NamedTuple):
    """help: one line. module: of `commands`, has `add_NAME_arguments(parser)` and
    `run_NAME(arguments) -> exit status`.

    runs_code: whether it runs the user's code. The others only read, perhaps another person's
    files. more: text below the arguments in its `--help`.
    """

    help: str
    module: str
    runs_code: bool = False
    more: str = ""


_PRESETS = """presets: distflow list presets
example: distflow train grpo actor_rollout_ref.model.path=MODEL data.train_files=problems.jsonl
         distflow train grpo ... --resume never
keys:    docs/config.md, or distflow config PRESET --explain KEY; first steps: docs/quickstart.md"""

COMMANDS: dict[str, Command] = {
    "new": Command("create a folder with a config, a reward function and data", "new"),
    "train": Command("train with a preset or a YAML file", "train", runs_code=True, more=_PRESETS),
    "sft": Command("fine-tune on given responses", "train", runs_code=True),
    "eval": Command(
        "generate responses to data.val_files and print the accuracy",
        "eval",
        runs_code=True,
    ),
    "chat": Command("chat with a model or a run's policy", "chat", runs_code=True),
    "serve": Command(
        "serve a model or a run's policy to clients made for OpenAI or Anthropic",
        "serve",
        runs_code=True,
    ),
    "export": Command("write a checkpoint as a Hugging Face folder", "export"),
    "plan": Command(
        "show what a run needs and how long it takes, without its devices", "plan", runs_code=True
    ),
    "config": Command("print the resolved config", "config"),
    "migrate": Command(
        "convert a config or command of TRL, OpenRLHF, verl, siiRL, ROLL or AReaL",
        "migration.conversion",
    ),
    "data": Command("show the data as the model receives it", "data", runs_code=True),
    "reward": Command(
        "test a reward function on right and wrong responses",
        "reward",
        runs_code=True,
    ),
    "rollout": Command(
        "test everything that a run expects of the rollout engine",
        "rollout",
        runs_code=True,
    ),
    "sandbox": Command(
        "run a Python file in the sandbox, or serve the sandbox to other machines", "sandbox"
    ),
    "methods": Command("list methods of papers, or compare two", "methods"),
    "list": Command("list presets or built-in models", "list"),
    "runs": Command("list the runs of a folder: state, step, accuracy", "runs"),
    "report": Command("rewrite a run's report.html, or export its trace or SQL views", "report"),
    "why": Command(
        "show what a step trained on, waited for and took its time for, or one sample", "why"
    ),
    "dashboard": Command("show a folder of runs in a browser", "dashboard"),
    "diff": Command("show what differs between two runs, and whether noise explains it", "diff"),
    "replay": Command("repeat a saved non-finite update on the CPU", "replay"),
    "doctor": Command("show what is wrong with a run, or with this machine", "doctor"),
    "selftest": Command(
        "verify on this machine that all kinds of runs give the same numbers", "selftest.command"
    ),
}
GROUPS = {
    "start and train": ("new", "migrate", "train", "sft"),
    "use a model": ("eval", "chat", "serve", "export"),
    "before a run": ("methods", "plan", "config", "data", "reward", "rollout", "sandbox"),
    "look at a run": ("runs", "dashboard", "report", "why", "diff", "replay"),
    "this machine": ("list", "doctor", "selftest"),
}
"""The commands as `distflow --help` shows them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for a user's mistake, 128 + the number of a
    signal that ended it, the error's own `exit_status` if it has one, 1 for anything else."""
    try:
        with sanitized_output(), interruptible():
            quiet_libraries()
            arguments = _parse(argv)
            handed = (
                getattr(arguments, "preset", None) or getattr(arguments, "model", None) or ""
            )  # maybe a run's folder

            runs_code = COMMANDS[arguments.command].runs_code and not os.path.isdir(handed)
            if runs_code or getattr(arguments, "trust_code", False):
                # a user's "module:function" is searched in the current folder first
                sys.path.insert(0, "")

            try:
                status = int(arguments.run(arguments))
                # at the end of the process a closed reader would be a separate error
                sys.stdout.flush()
                return status
            except BrokenPipeError:  # the reader closed our output
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return exit_status(signal.SIGPIPE)
            # the top level: one message, a status, the traceback on request
            except Exception as err:
                return _report_error(err, arguments.debug)
    except KeyboardInterrupt as err:
        number = err.number if isinstance(err, Interrupted) else signal.SIGINT
        print(ended_by(number), file=sys.stderr)
        return exit_status(number)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that ends with an argument's default, unless its text says it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_said = (
            not action.default
            or action.default == argparse.SUPPRESS
            or "default:" in (action.help or "")
        )
        if is_said:
            return action.help

        return f"{action.help}; default: %(default)s"


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest choice for a wrong one."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        from distflow.errors import nearest

        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
            near = nearest(found[1], re.findall(r"[\w-]+", found[2]))
            message += f"; did you mean '{near}'?" if near else ""

        if message.startswith("argument "):  # the usage, a line for each few options, would hide it
            self.exit(2, f"{self.prog}: {message}\n")
        super().error(message)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; parsed arguments have the function of the command as `run`."""
    groups = (
        f"{title}:\n" + "".join(f"  {n:<9} {COMMANDS[n].help}\n" for n in names)
        for title, names in GROUPS.items()
    )
    about = "RL post-training of language models as a dataflow\n\n" + "\n".join(groups)
    parser = _Parser(prog="distflow", description=about)
    parser.add_argument("--version", action="version", version=__version__)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for name, entry in COMMANDS.items():
        command = parsers.add_parser(name, description=entry.help, epilog=entry.more)
        module = import_module(f"distflow.commands.{entry.module}")
        getattr(module, f"add_{name}_arguments")(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=getattr(module, f"run_{name}"))

    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """key=value may stand before and after options; argparse alone accepts only those in one
    place."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)

    unknown = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        command = f"{parser.prog} {arguments.command}"
        what = _unrecognized(unknown, command, hasattr(arguments, "overrides"))
        parser.exit(2, f"{command}: {what}\n")

    if rest:
        arguments.overrides += rest
    return arguments


def _unrecognized(words: list[str], command: str, takes_keys: bool) -> str:
    """The message for unrecognised arguments; keys are written without dashes."""
    message = f"unrecognized arguments: {' '.join(words)}"
    name, _, value = words[0].lstrip("-").partition("=")
    if not (takes_keys and words[0].startswith("-") and name):
        return f"{message}; see {command} --help"

    from distflow.config.compose.unknown_keys import suggest
    from distflow.config.keys.schema import schema_keys

    key = name.replace("-", "_")
    if key in schema_keys():
        advice = f"write {key}={value or 'VALUE'}"
    else:
        advice = suggest(key, schema_keys())

    return f"{message}\nconfig keys are written key=value, without dashes: {advice}"


def _report_error(err: Exception, debug: bool) -> int:
    """Report the error; returns the exit status, or ends the process here if it would wait for a
    thread that never ends."""
    from distflow.errors import UserError
    from distflow.runtime.rollout_loop.loop_thread import LoopGivenUp

    is_users = isinstance(err, UserError)
    if debug:
        traceback.print_exc()
    else:
        if is_users:
            message = str(err)
        else:
            message = f"{type(err).__name__}: {err} (--debug shows where)"
        print(f"distflow: {message}", file=sys.stderr)

    status = USER_FAULT if is_users else int(getattr(err, "exit_status", OUR_FAULT))

    if isinstance(err, LoopGivenUp):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        leave_at_once(status)

    return status
