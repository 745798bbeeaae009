"""Runs chat templates in a process that can be killed: a template is foreign code that may never end."""

import json
import multiprocessing
import re
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase

from distflow.data.messages import RowError
from distflow.errors import UserError
from distflow.observe.files import JSON

RENDERS_WITHIN_S = 10.0
"""Timeout for each prompt; it usually takes a millisecond."""
MAX_CHARACTERS = 10_000_000
MORE_MEMORY_BYTES = 2 * 2**30
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")

Row = TypeVar("Row")
Rendered = TypeVar("Rendered", bound=JSON)
_OUT_OF_MEMORY = "it ran out of memory"
_REFUSES = "the chat template refuses the messages"


class Refused(str):
    """Why a row has no text."""


def render_all(
    rows: Sequence[Row], render: Callable[[Row], Rendered], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Rendered | Refused]:
    """One entry per row, in order: the result of `render`, a JSON value.

    render: calls the tokenizer's template; what it raises is a `Refused`. It runs in a fork of this process, which has
    the tokenizer as it is. Raises UserError naming the template's file where a row takes longer than
    `RENDERS_WITHIN_S`, becomes longer than `MAX_CHARACTERS` or needs more than `MORE_MEMORY_BYTES`.
    """
    if not rows:
        return
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe(duplex=False)
    process = forks.Process(target=_serve, args=(theirs, rows, render), name="chat-template", daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about other threads, which the fork does not need
        process.start()
    theirs.close()
    try:
        for number in range(1, len(rows) + 1):
            kind, value = _next(ours, f"{template_of(tokenizer)} cannot be rendered (row {number} of {len(rows)})")
            yield Refused(value) if kind == "refused" else value
    finally:
        process.kill()
        process.join()
        ours.close()


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template, named by its file."""
    folder = Path(str(tokenizer.name_or_path))
    for name in TEMPLATE_FILES:
        if (folder / name).is_file() and "chat_template" in name + (folder / name).read_text("utf-8", "replace"):
            return f"the chat template of '{folder / name}'"
    return f"the chat template of the tokenizer '{tokenizer.name_or_path}'"


def _next(channel: Connection, what: str) -> tuple[str, Any]:
    if not channel.poll(RENDERS_WITHIN_S):
        raise UserError(
            f"{what}: it did not end within {RENDERS_WITHIN_S:g} s. Repair its loop, or use another tokenizer"
        )
    try:
        kind, value = json.loads(channel.recv_bytes())
    except EOFError:
        raise UserError(f"{what}: the process that rendered it crashed") from None
    if kind == "fails":
        raise UserError(f"{what}: {value}")
    return kind, value


def _serve(channel: Connection, rows: Sequence[Row], render: Callable[[Row], JSON]) -> None:
    """In the fork: render each row, until the first that fails."""
    _limit_memory()
    for row in rows:
        kind, value = _rendered(row, render)
        channel.send_bytes(json.dumps([kind, value]).encode())
        if kind == "fails":
            return


def _rendered(row: Row, render: Callable[[Row], JSON]) -> tuple[str, JSON]:
    try:
        value = render(row)
        characters = len(value) if isinstance(value, str) else len(json.dumps(value, ensure_ascii=False))
    except MemoryError:
        return "fails", _OUT_OF_MEMORY
    except RowError as error:
        return "refused", str(error)
    except jinja2.TemplateError as error:
        return "refused", f"{_REFUSES}: {error}"[:1000]
    except Exception as error:  # foreign code
        return "refused", f"{_REFUSES}: {type(error).__name__}: {error}"[:1000]
    if characters > MAX_CHARACTERS:
        return "fails", f"a prompt becomes {characters:,} characters"
    return "rendered", value


def _limit_memory() -> None:
    """Limit memory to a little more than the process has; no limit if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return
    if found := re.search(r"VmData:\s+(\d+) kB", status):
        limit = int(found[1]) * 1024 + MORE_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
