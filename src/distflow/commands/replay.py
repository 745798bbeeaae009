"""`distflow replay`: runs a saved non-finite update again, on the CPU."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="a folder below RUN/bundles")


def run(arguments: argparse.Namespace) -> int:
    from distflow.pipelines.replay import replay_bundle

    for line in replay_bundle(Path(arguments.bundle)):
        print(line)
    return 0
