"""`distflow serve`: serves a model, or a run's policy, to clients of OpenAI and Anthropic, or to
training loops of the Tinker API."""

import argparse
import asyncio
import os
import secrets
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.arguments import (
    OF_RUN,
    add_trust_argument,
    at_least,
    listen,
)
from distflow.commands.quick_start import importing

if TYPE_CHECKING:
    from distflow.tinker.service import BaseModel

_KEY = "DISTFLOW_API_KEY"
_OF_WORKERS = ("trainer.launcher=", "trainer.n_gpus_per_node=", "trainer.allocation=")
"""How overrides begin that ask for workers; those of a run are for training it."""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL|RUN",
        help="a model's folder or hub id, a run's folder or a checkpoint",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys of the config: docs/config.md"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port",
        type=partial(at_least, 0),
        default=8000,
        help="port to listen on; 0 is any free port",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send; default: ${_KEY}, or a random key, printed once",
    )
    parser.add_argument(
        "--tinker",
        action="store_true",
        help="serve the Tinker API instead: clients train adapters and sample from them",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="of the checkpoints that clients of --tinker save; by default a temporary one",
    )
    add_trust_argument(parser, OF_RUN)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until interrupted or terminated."""
    say = partial(print, flush=True)
    say(f"distflow {__version__} · {arguments.model}")
    listening = listen(arguments.host, arguments.port)

    with importing():
        from distflow.config.derived_settings import is_one_process
        from distflow.launch.without_run.chat import load_config_of
        from distflow.launch.without_run.serve import base_model, serve, serve_tinker

    chosen = arguments.api_key or os.environ.get(_KEY)
    key = chosen or secrets.token_urlsafe(24)
    if arguments.tinker:
        # its client refuses others
        key = f"tml-{key.removeprefix('tml-')}"

    def report(url: str) -> None:
        say(
            f"OPENAI_BASE_URL={url}/v1\nANTHROPIC_BASE_URL={url}\n"
            f"model: {arguments.model}; Ctrl-C ends"
        )
        if not chosen:
            say(f"OPENAI_API_KEY={key}")

    def report_tinker() -> None:
        host, port = listening.getsockname()[:2]
        say(f"TINKER_BASE_URL=http://{host}:{port}\nTINKER_API_KEY={key}")
        say(f"base model: {arguments.model}; Ctrl-C ends")

    with TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        config = load_config_of(
            arguments.model, arguments.overrides, Path(folder), say, arguments.trust_code
        )
        if not arguments.tinker:
            asyncio.run(serve(config, arguments.model, key, listening, report))
            return 0

        kept = (arguments.folder or Path(folder) / "checkpoints").absolute()
        kept.mkdir(parents=True, exist_ok=True)
        asked = any(word.startswith(_OF_WORKERS) for word in arguments.overrides)
        if is_one_process(config) or not asked:
            own = base_model(config, arguments.model, kept)
            base: AbstractContextManager[BaseModel] = nullcontext(own)
        else:
            from distflow.cluster.tinker_workers import tinker_workers

            base = tinker_workers(config, arguments.model, kept, say)

        with base as ready:
            asyncio.run(serve_tinker(ready, key, listening, kept, report_tinker))

    return 0
