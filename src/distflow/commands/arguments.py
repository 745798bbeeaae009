"""Arguments that several commands have."""

import argparse
import math
import socket
from contextlib import suppress

from distflow.errors import UserError

OF_RUN = "a run's own config names"
"""Code that a command does not run without `--trust-code`."""


def add_preset_arguments(
    parser: argparse.ArgumentParser,
    default: str | None = None,
    what: str = "a preset's name, or a YAML file",
) -> None:
    """default: the preset if none is named; without a default, one is required. what: describes
    what can be named."""
    nargs = "?" if default is not None else None
    parser.add_argument("preset", nargs=nargs, default=default, metavar="PRESET|FILE", help=what)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="keys of the config: docs/config.md",
    )


def add_trust_argument(parser: argparse.ArgumentParser, which: str) -> None:
    """Add the option without which a command that reads files runs no Python code that they
    name."""
    parser.add_argument("--trust-code", action="store_true", help=f"run Python code that {which}")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        nargs="?",
        metavar="RUN",
        help="the run's folder; default: the newest of runs/*/*",
    )


def at_least(minimum: int, text: str, most: float = math.inf) -> int:
    """Parse an integer argument."""
    if not text.isdecimal() or not minimum <= int(text) <= most:
        if most == math.inf:
            bounds = f", {minimum} or more"
        else:
            bounds = f" from {minimum} to {most:,}"
        raise argparse.ArgumentTypeError(f"must be a whole number{bounds}, not '{text}'")

    return int(text)


def a_time(text: str, may_be_zero: bool = True) -> float:
    """Parse a length of time."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)) and (value > 0 or value == 0 and may_be_zero):
            return value
    raise argparse.ArgumentTypeError(
        f"must be a number, {'0 or more' if may_be_zero else 'above 0'}, not '{text}'"
    )


def listen(host: str, port: int) -> socket.socket:
    """Raises UserError if the address cannot be listened on."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as error:
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise UserError(
            f"{host}:{port} cannot be listened on: {why}; choose another --host or --port"
        ) from None
