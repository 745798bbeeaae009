"""`distflow replay`: runs a saved non-finite update again, on the CPU."""

import argparse
from pathlib import Path

from distflow.commands.arguments import add_trust_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="a folder below RUN/bundles")
    add_trust_argument(parser, "the run imported, or that came with its model")


def run(arguments: argparse.Namespace) -> int:
    from distflow.launch.replay_update import replay_bundle

    for line in replay_bundle(Path(arguments.bundle), trust_code=arguments.trust_code):
        print(line)
    return 0
