"""`distflow train`: a run by a preset or a YAML file."""

import argparse
from typing import TYPE_CHECKING, cast

from distflow import __version__
from distflow.builtin_names import LAUNCHERS
from distflow.commands.arguments import add_config_arguments
from distflow.import_target import load
from distflow.runtime.stop import exit_status

if TYPE_CHECKING:
    from distflow.runtime.spec import Launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_resume_arguments(parser)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", metavar="auto|never|PATH", help="where to resume from (default: auto)")
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help="may differ on resume")


def say(line: str) -> None:
    """Print at once, also where standard output is a file."""
    print(line, flush=True)


def run(arguments: argparse.Namespace) -> int:
    from distflow.commands.prestart import importing, rewards_ahead
    from distflow.config import describe, load_config
    from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
    from distflow.config.derived_settings import check_keys, resume_override

    if (
        arguments.command == "sft" and "=" in arguments.preset
    ):  # the preset was left out, and this is the first override
        arguments.preset, arguments.overrides = "sft", [arguments.preset, *arguments.overrides]
    say(f"distflow {__version__} · {arguments.preset}")
    overrides = [*arguments.overrides, *resume_override(arguments.resume)]
    loaded = load_config(arguments.preset, overrides, needed=NEEDED_TO_TRAIN)
    for line in loaded.notes:
        say(line)
    check_keys(arguments.allow_change)
    with rewards_ahead(loaded.config):
        with importing():
            from distflow.launch.make_spec import make_spec
            from distflow.launch.user_code import named_code

            launch = cast("Launch", load(LAUNCHERS[loaded.config.trainer.launcher].target))
        for line in named_code(loaded.config):
            say(f"your code: {line}")
        spec = make_spec(loaded, say)
        for line in describe(spec.config):
            say(line)
        outcome = launch(spec, allow_change=tuple(arguments.allow_change), say=say)
    if outcome.accuracy_before is not None and outcome.accuracy_after is not None:
        print(f"accuracy before RL: {outcome.accuracy_before:.2f}")
        print(f"accuracy after RL: {outcome.accuracy_after:.2f}")
    print(f"report: {outcome.report}")
    return 0 if outcome.signal is None else exit_status(outcome.signal)
