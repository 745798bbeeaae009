"""`distflow eval`: generates responses to the validation prompts, prints the accuracy, and saves
both with a report; `distflow chat`: chats with a model, or a run's policy, in the terminal;
`distflow serve`: serves one over routes compatible with OpenAI's and Anthropic's."""

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from distflow import __version__
from distflow.commands.arguments_and_run_folders import (
    RUNS,
    add_preset_arguments,
    add_trust_argument,
    at_least,
    importing,
    listen,
    rewards_ahead,
)
from distflow.errors import UserError
from distflow.observe.crash_safe_files import empty_folder
from distflow.observe.sanitized_output import escape_control

if TYPE_CHECKING:
    from distflow.config import Config, Loaded
    from distflow.launch.without_run.evaluate import Evaluation

# Evaluation needs no training data: the validation data replace them.
_EVAL_ONLY = (
    "data.train_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "critic.ppo_mini_batch_size=null",
)


_OF_RUN = "a run's own config names"


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_arguments(
        parser, what="a preset's name, a YAML file, or the folder of a run or of a checkpoint"
    )
    parser.add_argument(
        "--to",
        metavar="DIR",
        help="folder for responses and report; default: runs/evals/NAME-NUMBER",
    )
    add_trust_argument(parser, _OF_RUN)


def run_eval(arguments: argparse.Namespace) -> int:
    from distflow.observe.report.chart_data import wilson

    say = partial(print, flush=True)
    to = arguments.to
    chosen = None if to is None else empty_folder(to, "--to ")
    say(f"distflow {__version__} · evaluating {arguments.preset}")
    # Encoded prompts go to a temporary folder: a run may be writing to the config's.
    with TemporaryDirectory() as folder:
        loaded = _load(arguments, Path(folder), say)
        for line in loaded.notes:
            say(line)
        with rewards_ahead(loaded.config):
            with importing():
                from distflow.launch.make_spec import make_spec
                from distflow.launch.without_run.evaluate import evaluate
                from distflow.runtime.rollout_loop.rollout_services import try_rewards
            spec = make_spec(loaded, say=say)
            for line in try_rewards(spec):
                say(line)
            found = evaluate(spec, say)
    for name, value in sorted(found.metrics.items()):
        number = found.num_prompts.get(name)
        interval = (
            "" if number is None else "  (95 %: {:.4f} to {:.4f})".format(*wilson(value, number))
        )
        print(f"{escape_control(name, one_line=True)}: {value:.4f}{interval}")
    target = chosen or _numbered(arguments.preset)
    report = _write(target, arguments.preset, loaded.config, found)
    print(f"responses: {target / 'samples'}\nreport: {report}")
    return 0


def _numbered(preset: str) -> Path:
    """A new folder; other evaluations may be choosing theirs concurrently."""
    for number in count(1):
        folder = RUNS / "evals" / f"{Path(preset).resolve().name.removesuffix('.yaml')}-{number}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
            return folder
    raise AssertionError("numbers do not end")


def _write(target: Path, title: str, config: "Config", found: "Evaluation") -> Path:
    """Write the files of a run that has validated once, and their report."""
    from distflow.config import to_yaml
    from distflow.observe.report.build import write_report
    from distflow.observe.writing.run_folder import RunFolder

    with RunFolder(target, restart=0) as folder:
        folder.write_json(
            "run.json",
            {"title": f"evaluation of {title}", "model": config.actor_rollout_ref.model.path},
        )
        folder.write_text("config.yaml", to_yaml(config))
        folder.samples(0, found.rows, split="val")
        folder.metrics(0, "val", found.metrics)
        folder.event("end", "evaluated", status="finished")
    return write_report(target)


def _load(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> "Loaded":
    """Raises UserError if there is no model to evaluate, or no data."""
    from distflow.config import load_config
    from distflow.config.compose.check_paths import NEEDED_TO_EVALUATE
    from distflow.config.derived_settings import validates

    preset = arguments.preset
    if Path(preset).expanduser().is_dir():
        from distflow.launch.run_folders.export_checkpoint import write_config_of

        file = folder / "config_of_the_run.yaml"
        preset = str(write_config_of(Path(preset), file, say, trust_code=arguments.trust_code))
    overrides = [*arguments.overrides, *_EVAL_ONLY, f"trainer.default_local_dir={folder}/run"]
    loaded = load_config(preset, overrides, complete=False, needed=NEEDED_TO_EVALUATE)
    if not (data := loaded.config.data).domains:
        # nothing is trained on: the set must not be said to overlap with itself
        data = replace(data, train_files=data.val_files, allow_overlap=True)
    loaded = replace(loaded, config=replace(loaded.config, data=data))
    if not validates(loaded.config):
        raise UserError(
            "there are no validation problems: set data.val_files=FILE.jsonl (or .parquet, .csv)"
        )
    if not loaded.config.actor_rollout_ref.model.path:
        raise UserError(
            "there is no model to evaluate: set actor_rollout_ref.model.path to a folder or a hub "
            "id"
        )
    return loaded


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
    add_trust_argument(parser, _OF_RUN)


def run_chat(arguments: argparse.Namespace) -> int:
    """Answer each line of standard input until it ends. Loads the model in float32."""
    note = partial(print, file=sys.stderr, flush=True)
    note(f"distflow {__version__} · {arguments.model}")
    with importing():
        from distflow.launch.without_run.chat_serve_and_check_engine import ChatOptions, load_chat

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
    add_trust_argument(parser, _OF_RUN)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until interrupted or terminated."""
    say = partial(print, flush=True)
    say(f"distflow {__version__} · {arguments.model}")
    listening = listen(arguments.host, arguments.port)
    with importing():
        from distflow.launch.without_run.chat_serve_and_check_engine import load_config_of, serve

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
