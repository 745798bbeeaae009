"""`distflow eval`: answers the held-out problems and prints the accuracy."""

import argparse
from functools import partial
from tempfile import TemporaryDirectory

from distflow import __version__
from distflow.commands.config_arguments import add_config_arguments
from distflow.observe.text import visible

# No training data are needed to evaluate: the held-out ones stand for them.
_EVAL_ONLY = (
    "data.train_files=${data.val_files}",
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    print(f"distflow {__version__} · evaluating {arguments.preset}", flush=True)
    # What is encoded to be answered goes to a folder of its own: a run may be writing to the config's.
    with TemporaryDirectory() as folder:
        for name, value in sorted(_evaluated(arguments, folder).items()):
            print(f"{visible(name, one_line=True)}: {value:.4f}")
    return 0


def _evaluated(arguments: argparse.Namespace, folder: str) -> dict[str, float]:
    from distflow.commands.early import importing, verifiers_ahead
    from distflow.config import load_config

    overrides = [*arguments.overrides, *_EVAL_ONLY, f"trainer.default_local_dir={folder}"]
    loaded = load_config(arguments.preset, overrides)
    with verifiers_ahead(loaded.config):
        with importing():
            from distflow.pipelines.code import named_code
            from distflow.pipelines.spec import make_spec
            from distflow.runtime.evaluate import evaluate
        say = partial(print, flush=True)
        for line in named_code(loaded.config):
            say(f"your code: {line}")
        return evaluate(make_spec(loaded, say=say), say)
