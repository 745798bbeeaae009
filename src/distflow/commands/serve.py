"""`distflow serve`: serves a model, or a run's policy, to clients of OpenAI and Anthropic."""

import argparse
import asyncio
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from distflow import __version__
from distflow.commands.arguments import (
    OF_RUN,
    add_trust_argument,
    at_least,
    listen,
)
from distflow.commands.quick_start import importing

_KEY = "DISTFLOW_API_KEY"


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
    add_trust_argument(parser, OF_RUN)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until interrupted or terminated."""
    say = partial(print, flush=True)
    say(f"distflow {__version__} · {arguments.model}")
    listening = listen(arguments.host, arguments.port)

    with importing():
        from distflow.launch.without_run.chat import load_config_of
        from distflow.launch.without_run.serve import serve

    chosen = arguments.api_key or os.environ.get(_KEY)
    key = chosen or secrets.token_urlsafe(24)

    def report(url: str) -> None:
        say(
            f"OPENAI_BASE_URL={url}/v1\nANTHROPIC_BASE_URL={url}\n"
            f"model: {arguments.model}; Ctrl-C ends"
        )
        if not chosen:
            say(f"OPENAI_API_KEY={key}")

    with TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        config = load_config_of(
            arguments.model, arguments.overrides, Path(folder), say, arguments.trust_code
        )
        asyncio.run(serve(config, arguments.model, key, listening, report))

    return 0
