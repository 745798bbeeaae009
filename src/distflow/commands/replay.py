"""`distflow replay`: a saved update again."""

import argparse
from pathlib import Path

from distflow.commands.arguments import add_trust_argument


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="folder of the saved update, below RUN/bundles"
    )
    add_trust_argument(parser, "the run imported, or that came with its model")


def run_replay(arguments: argparse.Namespace) -> int:
    from distflow.launch.run_folders.replay_nonfinite_update import replay_bundle

    for line in replay_bundle(Path(arguments.bundle), trust_code=arguments.trust_code):
        print(line)
    return 0
