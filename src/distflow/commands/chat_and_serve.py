"""`distflow chat` talks to a model, or to the policy of a run, in the terminal; `distflow serve` serves it at the
routes of OpenAI and Anthropic."""

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from distflow import __version__
from distflow.commands.arguments_and_run_folders import at_least, importing
from distflow.errors import UserError


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|RUN", help="a model's folder or hub id, a run's folder or a checkpoint")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys of the config, e.g. data.system_prompt="
    )
    parser.add_argument("--max-tokens", type=partial(at_least, 1), metavar="N", help="of a response (512)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default: as in the config")
    parser.add_argument("--plain", action="store_true", help="do not use the chat template: each line is a prompt")


def run_chat(arguments: argparse.Namespace) -> int:
    """Answer each line of standard input until it ends. Loads the model in float32."""
    note = partial(print, file=sys.stderr, flush=True)
    note(f"distflow {__version__} · {arguments.model}")
    with importing():
        from distflow.launch.chat import ChatOptions, load_chat

    options = ChatOptions(arguments.max_tokens, arguments.temperature, arguments.plain)
    with TemporaryDirectory() as folder:
        chat = load_chat(arguments.model, arguments.overrides, options, Path(folder), note)
    note(f"{'with its chat template' if chat.has_template else 'each line is a prompt, as plain text'}; Ctrl-D ends")
    messages: list[dict[str, str]] = []
    for line in _lines():
        asked = [*messages, {"role": "user", "content": line}]
        try:
            response = chat.respond(asked if chat.has_template else line)
        except UserError as err:  # of this line: another may do
            note(f"distflow: {err}")
            continue
        messages = [*asked, {"role": "assistant", "content": response}]
    return 0


def _lines() -> Iterator[str]:
    """Of a person at a terminal, after a prompt, or of a pipe."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


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
        from distflow.launch.engine_without_run import serve

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
