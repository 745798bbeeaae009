"""`distflow export`: a checkpoint as a folder."""

import argparse
from pathlib import Path

from distflow.commands.arguments import add_trust_argument


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="RUN|CHECKPOINT", help="a run's folder, or one of its checkpoints"
    )
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="a folder that is empty or does not exist"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write only the LoRA adapter, as a PEFT folder"
    )
    add_trust_argument(parser, "came with the model")


def run_export(arguments: argparse.Namespace) -> int:
    from distflow.launch.run_folders.export_checkpoint import export_checkpoint

    source = Path(arguments.checkpoint)
    target = Path(arguments.to)
    export_checkpoint(
        source, target, trust_code=arguments.trust_code, say=print, adapter=arguments.adapter
    )

    return 0
