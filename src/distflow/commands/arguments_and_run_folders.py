"""Code shared by commands: arguments, finding a run's folder, and a quick start of runs: reward
processes start while torch is imported without garbage collection."""

import argparse
import gc
import math
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.errors import UserError

if TYPE_CHECKING:
    from distflow.config import Config

RUNS = Path("runs")
LEDGER = "ledger.jsonl"


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
        bounds = f", {minimum} or more" if most == math.inf else f" from {minimum} to {most:,}"
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


def find_run(run_dir: str | None) -> Path:
    """The named folder, or the newest run below runs/. Raises UserError if it does not exist."""
    found = Path(run_dir).expanduser() if run_dir is not None else newest_run()
    if found is None:
        raise UserError(f"there is no run below {RUNS.absolute()}: name the run's folder")
    if not found.is_dir():
        raise UserError(f"there is no folder {found}: name the run's folder")
    if not any(
        (found / name).exists() for name in ("events.jsonl", "run.json", "metrics.jsonl", LEDGER)
    ):
        raise not_a_run(found)
    return found


def not_a_run(folder: Path) -> UserError:
    """The error for a folder without a run's files; if runs are right below it, their folder was
    probably meant."""
    if below := sorted(file.parent.name for file in folder.glob("*/events.jsonl")):
        return UserError(
            f"{folder} is not a run's folder, but contains runs: name {folder / below[-1]}, for "
            "example"
        )
    return UserError(
        f"{folder} is not a run's folder: it has no file events.jsonl; if a run is starting, try "
        "later"
    )


def newest_run() -> Path | None:
    """The run in the current folder's runs/ whose ledger was written last."""
    ledgers = sorted(RUNS.glob(f"*/*/{LEDGER}"), key=lambda path: path.stat().st_mtime)
    return ledgers[-1].parent if ledgers else None


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


@contextmanager
def rewards_ahead(config: "Config") -> Iterator[None]:
    """Meanwhile load and self-check the reward functions that a built-in pipeline will use; a
    custom one may use none.

    Raises UserError for an unknown reward.
    """
    from distflow.config.derived_settings import find_pipeline
    from distflow.rewards.pool.domain_pools import RewardSettings, pool_settings, started_early
    from distflow.rewards.startup_checks import self_check_once

    pipeline = find_pipeline(config)
    with ExitStack() as stack:
        if pipeline is not None and pipeline.generates:
            for each in pool_settings(RewardSettings.of(config)).values():
                stack.enter_context(started_early(each))
            if config.trust.check_rewards:
                self_check_once()
        yield


@contextmanager
def importing() -> Iterator[None]:
    """Imports torch without the garbage collector, which would repeatedly scan all imported
    objects: an eighth of the time. The objects are frozen, so that later collections skip them."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
