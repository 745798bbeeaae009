"""`distflow eval`: generates responses to the validation prompts and prints the accuracy."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.shared import add_preset_arguments, importing, rewards_ahead
from distflow.errors import UserError
from distflow.observe.sanitize import escape_control

if TYPE_CHECKING:
    from distflow.config import Loaded

# Evaluation needs no training data: the validation data stand in for them.
_EVAL_ONLY = (
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "critic.ppo_mini_batch_size=null",
)
# A run's config says how to load the model that it began from; its own policy is complete.
_OF_THE_BEGINNING = (
    "actor_rollout_ref.model.tokenizer_path=null",
    "actor_rollout_ref.model.init=pretrained",
    "actor_rollout_ref.model.gguf_file=null",
    "actor_rollout_ref.model.revision=null",
)


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_arguments(parser, what="a preset's name, a YAML file, or the folder of a run or of a checkpoint")


def run_eval(arguments: argparse.Namespace) -> int:
    say = partial(print, flush=True)
    say(f"distflow {__version__} · evaluating {arguments.preset}")
    # Encoded prompts go to a temporary folder: a run may be writing to the config's.
    with TemporaryDirectory() as folder:
        loaded = _load(arguments.preset, arguments.overrides, Path(folder))
        for line in loaded.notes:
            say(line)
        with rewards_ahead(loaded.config):
            with importing():
                from distflow.launch.evaluate import evaluate
                from distflow.launch.make_spec import make_spec
            metrics = evaluate(make_spec(loaded, say=say), say)
    for name, value in sorted(metrics.items()):
        print(f"{escape_control(name, one_line=True)}: {value:.4f}")
    return 0


def _load(preset: str, overrides: list[str], folder: Path) -> "Loaded":
    """Raises UserError where there is nothing to evaluate, or nothing to evaluate on."""
    from distflow.config import load_config
    from distflow.config.compose.check_paths import NEEDED_TO_EVALUATE
    from distflow.config.domain_settings import validates

    if Path(preset).expanduser().is_dir():
        from distflow.launch.initial_policy import write_config_of

        preset, initial = str(write_config_of(Path(preset), folder / "config_of_the_run.yaml")), _OF_THE_BEGINNING
        overrides = [*initial, *overrides]
    overrides = [*overrides, *_EVAL_ONLY, f"trainer.default_local_dir={folder}/run"]
    loaded = load_config(preset, overrides, complete=False, needed=NEEDED_TO_EVALUATE)
    if not (data := loaded.config.data).domains:
        data = replace(data, train_files=data.val_files)
    loaded = replace(loaded, config=replace(loaded.config, data=data))
    if not validates(loaded.config):
        raise UserError("there are no problems to answer: set data.val_files=FILE.jsonl (or .parquet, .csv)")
    if not loaded.config.actor_rollout_ref.model.path:
        raise UserError("there is no model to evaluate: set actor_rollout_ref.model.path to a folder or a hub id")
    return loaded
