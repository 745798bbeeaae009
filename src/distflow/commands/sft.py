"""`distflow sft`: supervised fine-tuning, which is `train` with the preset of that name unless another is given."""

import argparse

from distflow.commands import train
from distflow.commands.config_arguments import add_config_arguments

PRESET = "sft"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, default=PRESET)
    train.add_resume_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if "=" in arguments.preset:  # the preset was left out, and this is the first override
        arguments.preset, arguments.overrides = PRESET, [arguments.preset, *arguments.overrides]
    return train.run(arguments)
