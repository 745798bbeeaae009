"""`distflow sft`: supervised fine-tuning, which is `train` with the preset of that name unless another is given."""

import argparse

from distflow.commands.arguments import add_config_arguments
from distflow.commands.train import add_resume_arguments, run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, default="sft")
    add_resume_arguments(parser)
