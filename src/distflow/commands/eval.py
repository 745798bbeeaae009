"""`distflow eval`: generates responses to the validation prompts, and prints the accuracy."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.arguments import (
    OF_RUN,
    add_preset_arguments,
    add_trust_argument,
)
from distflow.commands.find_run import RUNS
from distflow.commands.quick_start import importing, rewards_ahead
from distflow.errors import UserError
from distflow.observe.crash_safe_files import empty_folder
from distflow.observe.sanitized_output import escape_control

if TYPE_CHECKING:
    from distflow.config import Config, Loaded
    from distflow.launch.without_run.evaluate import Evaluation


# Evaluation needs no training data: the validation data replace them.
_EVAL_ONLY = (
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "critic.ppo_mini_batch_size=null",
)


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_arguments(
        parser, what="a preset's name, a YAML file, or the folder of a run or of a checkpoint"
    )
    parser.add_argument(
        "--to",
        metavar="DIR",
        help="folder for responses and report; default: runs/evals/NAME-NUMBER",
    )
    add_trust_argument(parser, OF_RUN)


def run_eval(arguments: argparse.Namespace) -> int:
    from distflow.observe.report.chart_data import wilson

    say = partial(print, flush=True)
    to = arguments.to
    chosen = None if to is None else empty_folder(to, "--to ")
    say(f"distflow {__version__} · evaluating {arguments.preset}")

    # Encoded prompts go to a temporary folder: a run may be writing to the config's.
    with TemporaryDirectory() as folder:
        loaded = _load(arguments, Path(folder), say)
        for line in loaded.notes:
            say(line)

        with rewards_ahead(loaded.config):
            with importing():
                from distflow.launch.make_spec import make_spec
                from distflow.launch.without_run.evaluate import evaluate
                from distflow.runtime.rollout_loop.rollout_services import try_rewards

            spec = make_spec(loaded, say=say, trains=False)
            for line in try_rewards(spec):
                say(line)
            found = evaluate(spec, say)

    for name, value in sorted(found.metrics.items()):
        number = found.num_prompts.get(name)
        interval = ""
        if number is not None:
            interval = "  (95 %: {:.4f} to {:.4f})".format(*wilson(value, number))
        print(f"{escape_control(name, one_line=True)}: {value:.4f}{interval}")

    target = chosen or _numbered(arguments.preset)
    report = _write(target, arguments.preset, loaded.config, found)
    print(f"responses: {target / 'samples'}\nreport: {report}")
    return 0


def _numbered(preset: str) -> Path:
    """A new folder; other evaluations may be choosing theirs concurrently."""
    for number in count(1):
        folder = RUNS / "evals" / f"{Path(preset).resolve().name.removesuffix('.yaml')}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
            return folder
    raise AssertionError("numbers do not end")


def _write(target: Path, title: str, config: "Config", found: "Evaluation") -> Path:
    """Write the files of a run that has validated once, and their report."""
    from distflow.config import to_yaml
    from distflow.observe.report.build import write_report
    from distflow.observe.writing.run_folder import RunFolder

    with RunFolder(target, restart=0) as folder:
        folder.write_json(
            "run.json",
            {"title": f"evaluation of {title}", "model": config.actor_rollout_ref.model.path},
        )
        folder.write_text("config.yaml", to_yaml(config))
        folder.samples(0, found.rows, split="val")
        folder.metrics(0, "val", found.metrics)
        folder.event("end", "evaluated", status="finished")

    return write_report(target)


def _load(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> "Loaded":
    """Raises UserError if there is no model to evaluate, or no data."""
    from distflow.config import load_config
    from distflow.config.compose.check_paths import NEEDED_TO_EVALUATE
    from distflow.config.derived_settings import validates

    preset = arguments.preset
    if Path(preset).expanduser().is_dir():
        from distflow.launch.run_folders.export_checkpoint import write_config_of

        file = folder / "config_of_the_run.yaml"
        preset = str(write_config_of(Path(preset), file, say, trust_code=arguments.trust_code))

    overrides = [*arguments.overrides, *_EVAL_ONLY, f"trainer.default_local_dir={folder}/run"]
    loaded = load_config(preset, overrides, complete=False, needed=NEEDED_TO_EVALUATE)
    if not (data := loaded.config.data).domains:
        # nothing is trained on: the set must not be said to overlap with itself
        data = replace(data, train_files=data.val_files, allow_overlap=True)

    loaded = replace(loaded, config=replace(loaded.config, data=data))
    if not validates(loaded.config):
        raise UserError(
            "there are no validation problems: set data.val_files=FILE.jsonl (or .parquet, .csv)"
        )
    if not loaded.config.actor_rollout_ref.model.path:
        raise UserError(
            "there is no model to evaluate: set actor_rollout_ref.model.path to a folder or a hub "
            "id"
        )

    return loaded
