"""`distflow rollout check`: tests a rollout engine on all that a run expects of it."""

import argparse
import asyncio
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.arguments import add_preset_arguments
from distflow.commands.quick_start import importing
from distflow.errors import UserError
from distflow.observe.sanitized_output import escape_control

if TYPE_CHECKING:
    from distflow.config import Config


MODEL = "actor_rollout_ref.model.path"


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="test the engine")
    add_preset_arguments(parser)


def run_rollout(arguments: argparse.Namespace) -> int:
    """Print a line for each property; returns 1 if one fails."""
    from distflow.config import load_config

    with TemporaryDirectory() as folder:
        (Path(folder) / "run").mkdir()
        overrides = [*arguments.overrides, f"trainer.default_local_dir={folder}/run"]

        loaded = load_config(arguments.preset, overrides, complete=False, needed=(MODEL,))
        if not loaded.config.actor_rollout_ref.model.path:
            raise UserError(
                f"there is no model to generate with: set {MODEL} to a folder or a hub id"
            )

        with importing():
            from distflow.launch.run_folders.export_checkpoint import with_models_of_runs
        return asyncio.run(_check(with_models_of_runs(loaded, partial(print, flush=True)).config))


async def _check(config: "Config") -> int:
    from distflow.launch.without_run.serve import check_rollout

    settings = config.actor_rollout_ref
    failed = 0
    print(
        (
            f"distflow {__version__} · rollout engine '{settings.rollout.name}' · "
            f"{settings.model.path}"
        ),
        flush=True,
    )

    async for found in check_rollout(config):
        failed += found.outcome == "failed"
        print(
            f"{found.name:<20} {found.outcome:<14} {escape_control(found.text, one_line=True)}",
            flush=True,
        )

    print(
        f"{failed} properties failed: do not train with this engine"
        if failed
        else "no property failed"
    )
    return int(failed > 0)
