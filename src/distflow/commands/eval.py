"""`distflow eval`: answers the held-out problems and prints the accuracy."""

import argparse

from distflow import __version__
from distflow.commands.config_arguments import add_config_arguments

# No training data are needed to evaluate: the held-out ones stand for them.
_EVAL_ONLY = (
    "data.train_files=${data.val_files}",
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from distflow.config import load_config

    print(f"distflow {__version__} · evaluating {arguments.preset}", flush=True)
    loaded = load_config(arguments.preset, [*arguments.overrides, *_EVAL_ONLY])
    from distflow.pipelines.spec import make_spec
    from distflow.runtime.evaluate import evaluate

    metrics = evaluate(make_spec(loaded, say=lambda line: print(line, flush=True)))
    for name, value in sorted(metrics.items()):
        print(f"{name}: {value:.4f}")
    return 0
