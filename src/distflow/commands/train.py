"""`distflow train`: a run by a preset or a YAML file; `distflow sft`: the same with the preset `sft` unless another is
named."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, cast

from distflow import __version__
from distflow.builtin_names import LAUNCHERS
from distflow.commands.shared import add_preset_arguments, importing, rewards_ahead
from distflow.import_target import load
from distflow.runtime.stop import exit_status

if TYPE_CHECKING:
    from distflow.runtime.spec import Launch


def add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    add_train_arguments(parser, default="sft")


def add_train_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    add_preset_arguments(parser, default)
    parser.add_argument("--resume", metavar="auto|never|PATH", help="where to resume from (default: auto)")
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help="may differ on resume")


def run_sft(arguments: argparse.Namespace) -> int:
    if "=" in arguments.preset:  # the preset was left out, and this is the first override
        arguments.preset, arguments.overrides = "sft", [arguments.preset, *arguments.overrides]
    return run_train(arguments, base="sft")


def run_train(arguments: argparse.Namespace, base: str = "grpo") -> int:
    from distflow.config import describe, load_config
    from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
    from distflow.config.derived_settings import check_keys, resume_override
    from distflow.observe.writing.folder_lock import claimed

    say = partial(print, flush=True)
    say(f"distflow {__version__} · {arguments.preset}")
    overrides = [*arguments.overrides, *resume_override(arguments.resume)]
    loaded = load_config(arguments.preset, overrides, needed=NEEDED_TO_TRAIN, base=base)
    for line in loaded.notes:
        say(line)
    check_keys(arguments.allow_change)
    with claimed(loaded.config.trainer.run_dir), rewards_ahead(loaded.config):
        with importing():
            from distflow.launch.make_spec import make_spec

            launch = cast("Launch", load(LAUNCHERS[loaded.config.trainer.launcher].target))
        spec = make_spec(loaded, say)
        for line in describe(spec.config):
            say(line)
        outcome = launch(spec, allow_change=tuple(arguments.allow_change), say=say)
    if outcome is None:
        return 0
    if outcome.accuracy_before is not None and outcome.accuracy_after is not None:
        print(f"accuracy before RL: {outcome.accuracy_before:.2f}")
        print(f"accuracy after RL: {outcome.accuracy_after:.2f}")
    print(f"report: {outcome.report}")
    return 0 if outcome.signal is None else exit_status(outcome.signal)
