"""`distflow export`: a checkpoint as a Hugging Face folder."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--to", required=True, metavar="DIR", help="a folder that is empty or not there yet")


def run(arguments: argparse.Namespace) -> int:
    from distflow.pipelines.export import export_checkpoint

    folder = export_checkpoint(Path(arguments.checkpoint), Path(arguments.to))
    print(f"exported to {folder}")
    return 0
