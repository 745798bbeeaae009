"""`distflow serve`: a model, or the policy of a run, at the routes of OpenAI and Anthropic."""

import argparse
import asyncio
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from distflow import __version__
from distflow.commands.arguments_and_run_folders import importing

_KEY = "DISTFLOW_API_KEY"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|RUN", help="a model's folder or hub id, a run's folder or a checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 is any free port")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"what clients must send; default: ${_KEY}, or a random one, printed once"
    )


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until it is interrupted or terminated."""
    say = partial(print, flush=True)
    say(f"distflow {__version__} · {arguments.model}")
    with importing():
        from distflow.launch.chat import load_config_of
        from distflow.launch.serve import serve

    chosen = arguments.api_key or os.environ.get(_KEY)
    key = chosen or secrets.token_urlsafe(24)

    def report(url: str) -> None:
        say(f"OPENAI_BASE_URL={url}/v1\nANTHROPIC_BASE_URL={url}\nmodel: {arguments.model}; Ctrl-C ends")
        if not chosen:
            say(f"OPENAI_API_KEY={key}")

    with TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        config = load_config_of(arguments.model, arguments.overrides, Path(folder), say)
        asyncio.run(serve(config, arguments.model, key, (arguments.host, arguments.port), report))
    return 0
