"""The arguments of commands that read a config."""

import argparse


def add_config_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """default: the preset that stands for one that is left out; without it there must be one."""
    nargs = "?" if default else None
    parser.add_argument("preset", nargs=nargs, default=default, help="a preset's name, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra's override syntax")
