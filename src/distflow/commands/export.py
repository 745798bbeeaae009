"""`distflow export`: a checkpoint as a Hugging Face folder."""

import argparse
from pathlib import Path

from distflow.commands.arguments import add_trust_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--to", required=True, metavar="DIR", help="a folder that is empty or not there yet")
    add_trust_argument(parser, "came with the model")


def run(arguments: argparse.Namespace) -> int:
    from distflow.launch.initial_policy import export_checkpoint

    export_checkpoint(Path(arguments.checkpoint), Path(arguments.to), trust_code=arguments.trust_code, say=print)
    return 0
