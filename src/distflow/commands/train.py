"""`distflow train`: a run from a preset or a YAML file, or several concurrent ones; `distflow sft`:
the same with the preset `sft` unless another is named."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from distflow import __version__
from distflow.commands.arguments import add_preset_arguments
from distflow.commands.quick_start import importing, rewards_ahead
from distflow.config.compose.setting_origins import preset_names
from distflow.errors import UserError, hint
from distflow.import_target import load
from distflow.processes.survivors import survivors_ended
from distflow.runtime.stop_signals import exit_status

if TYPE_CHECKING:
    from distflow.config import Loaded
    from distflow.runtime.spec import Launch, Spec


def add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    add_train_arguments(parser, default="sft")


def add_train_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    add_preset_arguments(parser, default)
    parser.add_argument(
        "--resume", metavar="auto|never|PATH", help="where to resume from; default: auto"
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="allow this key to differ from the checkpoint on resume",
    )


def run_sft(arguments: argparse.Namespace) -> int:
    if "=" in arguments.preset:  # the preset was left out, and this is the first override
        arguments.preset, arguments.overrides = "sft", [arguments.preset, *arguments.overrides]
    return run_train(arguments, base="sft")


def split_configs(preset: str, words: Sequence[str]) -> dict[str, list[str]]:
    """The configs of a command line by name, each as a preset or file and its overrides: `preset`,
    and each word that is one. Other words are overrides of all, or of one: `NAME:key=value`.

    A name is that of the file, with its position if it occurs twice. Raises UserError for another
    name.
    """
    presets = [preset]
    overrides = []
    for word in words:
        is_file = "=" not in word and word.endswith((".yaml", ".yml", ".py"))
        if is_file or word in preset_names():
            presets.append(word)
        else:
            overrides.append(word)

    names = [Path(path).stem for path in presets]
    if len(set(names)) < len(names):
        names = [f"{name}-{place}" for place, name in enumerate(names, start=1)]

    commands = {name: [path] for name, path in zip(names, presets, strict=True)}
    for word in overrides:
        name, colon, of_one = word.partition(":")
        if not colon or "=" in name or len(names) == 1:
            for command in commands.values():
                command.append(word)
        elif name in commands:
            commands[name].append(of_one)
        else:
            raise UserError(f"'{word}' is for a config '{name}'{hint(name, names)}")

    return commands


@survivors_ended()  # before code of the user runs
def run_train(arguments: argparse.Namespace, base: str = "grpo") -> int:
    """Policies of one graph train one after another, over Ray concurrently. All are checked before
    the first starts."""
    from distflow.config.derived_settings import check_keys, launch_target
    from distflow.observe.writing.run_folder import claimed

    if len(commands := split_configs(arguments.preset, arguments.overrides)) > 1:
        if base != "grpo":
            raise UserError(
                f"distflow sft takes one config, not {', '.join(commands)}: use `distflow train`"
            )
        return _train_several(commands, arguments)

    say = partial(print, flush=True)
    say(f"distflow {__version__} · {arguments.preset}")
    runs = _load_runs(arguments, base, say)
    check_keys(arguments.allow_change)
    if len(runs) > 1 and runs[0].config.trainer.launcher == "ray" and base == "grpo":
        return _train_several(commands, arguments)

    with ExitStack() as stack:
        for loaded in runs:
            stack.enter_context(claimed(loaded.config.trainer.run_dir))
        stack.enter_context(rewards_ahead(runs[0].config))

        with importing():
            from distflow.runtime.spec import LaunchOptions

            launch = cast("Launch", load(launch_target(runs[0].config)))

        options = LaunchOptions(tuple(arguments.allow_change), say)
        for spec in _make_specs(runs, say):
            if len(runs) > 1:
                say(f"training policy {spec.config.dag.policy}")

            outcome = launch(spec, options)
            if outcome is None:
                continue

            for line in outcome.lines():
                say(line)
            if outcome.signal is not None:
                return exit_status(outcome.signal)

    return 0


def _make_specs(runs: "Sequence[Loaded]", say: Callable[[str], None]) -> "list[Spec]":
    """The specs of all runs, which are described, with the user's code tried."""
    from distflow.config import describe

    with importing():
        from distflow.launch.dry_run_of_user_code import try_users_code
        from distflow.launch.make_spec import make_spec

    specs = []
    for loaded in runs:
        if len(runs) > 1:
            say(f"policy {loaded.config.dag.policy}, in {loaded.config.trainer.run_dir}")

        spec = make_spec(loaded, say)
        for line in describe(spec.config):
            say(line)
        if spec.predicted:
            say(spec.predicted["line"])
        specs.append(spec)

    specs[0] = try_users_code(specs[0], say)
    return specs


def _load_runs(
    arguments: argparse.Namespace, base: str, say: Callable[[str], None]
) -> list["Loaded"]:
    """The config, or one for each of its policies."""
    from distflow.config import load_config
    from distflow.config.compose.check_paths import NEEDED_TO_TRAIN
    from distflow.config.derived_settings import resume_override, with_own_policies

    overrides = [*arguments.overrides, *resume_override(arguments.resume)]
    load_own = partial(load_config, arguments.preset, needed=NEEDED_TO_TRAIN, base=base)

    loaded = load_own(overrides)
    if loaded.config.trainer.allocation == "auto":
        from distflow.launch.plans.run_planner import searched_allocation

        overrides += searched_allocation(arguments.preset, overrides, say)
        loaded = load_own(overrides)

    for line in loaded.notes:
        say(line)
    policies = with_own_policies(loaded.config)
    if policies and arguments.resume not in (None, "auto", "never"):
        raise UserError("--resume takes the checkpoint of one policy: write dag.policy=NAME too")
    if policies and loaded.config.trainer.launcher == "slurm":
        raise UserError(
            "trainer.launcher=slurm: a job trains one policy: submit one for each of "
            f"dag.policy={'|'.join(policies)}"
        )

    return [load_own([*overrides, *own]) for own in policies.values()] or [loaded]


def _train_several(commands: dict[str, list[str]], arguments: argparse.Namespace) -> int:
    """The runs of several configs at once, each on its share of the devices."""
    from distflow.config.derived_settings import check_keys

    if arguments.resume not in (None, "auto", "never"):
        raise UserError("--resume is for a single run: write NAME:trainer.resume_mode=PATH")

    check_keys(arguments.allow_change)
    with importing():
        from distflow.launch.plan_concurrent_runs import SeveralOptions, run_several

    say = partial(print, flush=True)
    say(f"distflow {__version__} · {', '.join(commands)} side by side")
    options = [f"--allow-change={key}" for key in arguments.allow_change]
    options += [f"--resume={arguments.resume}"] if arguments.resume else []
    options += ["--debug"] if arguments.debug else []

    return run_several(commands, SeveralOptions(tuple(options), say))[1].status
