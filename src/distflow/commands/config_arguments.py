"""The arguments of commands that read a config."""

import argparse


def add_config_arguments(
    parser: argparse.ArgumentParser, default: str | None = None, what: str = "a preset's name, or a YAML file"
) -> None:
    """default: the preset that stands for one that is left out; without it there must be one. what: may be named."""
    nargs = "?" if default else None
    parser.add_argument("preset", nargs=nargs, default=default, help=what)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra's override syntax")


def add_trust_argument(parser: argparse.ArgumentParser, which: str) -> None:
    """Without it a command that looks at files runs no Python code that they name."""
    parser.add_argument("--trust-code", action="store_true", help=f"run Python code that {which}")
