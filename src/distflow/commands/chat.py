"""`distflow chat`: chats with a model, or a run's policy, in the terminal."""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from distflow import __version__
from distflow.commands.arguments import (
    OF_RUN,
    add_trust_argument,
    at_least,
)
from distflow.commands.quick_start import importing
from distflow.errors import UserError


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL|RUN",
        help="a model's folder or hub id, a run's folder or a checkpoint",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="keys of the config, e.g. data.system_prompt=",
    )
    parser.add_argument(
        "--max-tokens", type=partial(at_least, 1), metavar="N", help="of a response; default: 512"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy; default: as in the config"
    )
    parser.add_argument(
        "--plain", action="store_true", help="do not use the chat template: each line is a prompt"
    )
    add_trust_argument(parser, OF_RUN)


def run_chat(arguments: argparse.Namespace) -> int:
    """Answer each line of standard input until it ends. Loads the model in float32."""
    note = partial(print, file=sys.stderr, flush=True)
    note(f"distflow {__version__} · {arguments.model}")
    with importing():
        from distflow.launch.without_run.chat import ChatOptions, load_chat

    options = ChatOptions(
        arguments.max_tokens, arguments.temperature, arguments.plain, arguments.trust_code
    )
    with TemporaryDirectory() as folder:
        chat = load_chat(arguments.model, arguments.overrides, options, Path(folder), note)
    note(
        f"{'with its chat template' if chat.has_template else 'each line is a prompt, as plain text'}; "  # noqa: E501
        "Ctrl-D ends"
    )

    messages: list[dict[str, str]] = []
    for line in _lines():
        asked = [*messages, {"role": "user", "content": line}]
        try:
            response = chat.respond(asked if chat.has_template else line)
        except UserError as err:  # the error concerns this line only
            note(f"distflow: {err}")
            continue

        messages = [*asked, {"role": "assistant", "content": response}]

    return 0


def _lines() -> Iterator[str]:
    """Lines from a terminal, after a prompt, or from a pipe."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
