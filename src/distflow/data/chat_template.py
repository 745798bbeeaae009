"""Renders chat templates in a process that can be killed, since a template is third-party code that
may never end.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from distflow.data.control_words import control_words, described, find_control_word
from distflow.data.messages import ASSISTANT, Messages, RowError
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON
from distflow.processes.channel import Channel, PeerGone, encode
from distflow.processes.fork import limited_fork
from distflow.untrusted_files import read_file

RENDERS_WITHIN_S = 10.0
"""Timeout for each prompt; it usually takes a millisecond."""
MAX_CHARACTERS = 10_000_000
MORE_MEMORY_BYTES = 2**29
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")

_REFUSES = "the chat template rejects the messages"

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Refused(str):
    """Why a row has no text."""


def render_all(
    rows: Sequence[Any], render: Callable[[Any], JSON], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Any]:
    """One entry per row, in order: the result of `render`, a JSON value, or `Refused`.

    render: calls the tokenizer's template; an error that it raises becomes a `Refused`. It runs in
    a fork of this process. Raises UserError naming the template's file if a row takes longer than
    `RENDERS_WITHIN_S`, becomes longer than `MAX_CHARACTERS` or needs more than `MORE_MEMORY_BYTES`.
    """
    if not rows:
        return

    with limited_fork(partial(_serve, rows, render), MORE_MEMORY_BYTES) as rendered:
        template = template_of(tokenizer)
        for number in range(1, len(rows) + 1):
            kind, value = _next(
                rendered, f"{template} cannot be rendered (row {number} of {len(rows)})"
            )
            yield Refused(value) if kind == "refused" else value


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template in words, with its file."""
    folder = Path(str(tokenizer.name_or_path))
    for name in TEMPLATE_FILES:
        if (folder / name).is_file() and b"chat_template" in name.encode() + read_file(
            folder / name
        ):
            return f"the chat template of '{folder / name}'"

    return f"the chat template of the tokenizer '{tokenizer.name_or_path}'"


@dataclass(frozen=True)
class Chat:
    """The values that one row passes to the chat template."""

    messages: Messages
    tools: list[JSON] = field(default_factory=list)
    kwargs: Mapping[str, object] = field(default_factory=dict)


class ChatTemplate:
    """A tokenizer's template, filled with a row's values."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, has_own_replies: bool = False) -> None:
        """has_own_replies: the assistant's messages are the model's own, and may have words of the
        template."""
        self._tokenizer: Any = tokenizer
        self._has_own_replies = has_own_replies

    def check(self, chat: Chat, response: str = "") -> None:
        """Raises RowError if the row has tools or tool calls that the template would omit, or a
        message with words of the template itself. response: to learn, beside the messages."""
        template = self._text(chat)
        unused = "the chat template does not use {}, but the row has some: use a model whose does"
        if chat.tools and not re.search(r"\btools\b", template):
            advice = ", or name another column with data.tools_key"
            raise RowError(unused.format("tools") + advice)

        has_calls = any("tool_calls" in message for message in chat.messages)
        if has_calls and not re.search(r"\btool_calls\b", template):
            raise RowError(unused.format("tool_calls"))
        answered: Messages = [{"role": ASSISTANT, "content": response}] if response else []
        self.check_contents([*chat.messages, *answered])

    def check_contents(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises RowError for a message whose content has words that the template itself writes
        around messages."""
        if (words := control_words(self._tokenizer)) is None:
            return

        for number, message in enumerate(messages, 1):
            if message.get("role") == ASSISTANT and self._has_own_replies:
                continue
            if word := find_control_word(message.get("content"), words):
                what = described(word, template_of(self._tokenizer))
                raise RowError(f"message {number}, of the {message.get('role')}, {what}")

    def render(self, chat: Chat, num_messages: int | None = None, *, prompts: bool) -> str:
        """The text of the first messages. prompts: with the prompt for the assistant's next
        message."""
        return str(
            self._tokenizer.apply_chat_template(
                chat.messages[:num_messages],
                tools=chat.tools or None,
                tokenize=False,
                add_generation_prompt=prompts,
                **chat.kwargs,
            )
        )

    def render_marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]] | None:
        """The whole conversation, and the parts of it that the template marks as generated; None if
        it marks none."""
        if not _MARK.search(self._text(chat)):
            return None

        rendered: Any = render_jinja_template(
            [chat.messages],
            tools=chat.tools or None,
            chat_template=self._text(chat),
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **chat.kwargs},
        )
        (text,), (blocks,) = rendered

        return str(text), [(start, end) for start, end in blocks if start < end]

    def _text(self, chat: Chat) -> str:
        return str(self._tokenizer.get_chat_template(None, chat.tools or None))


def _next(channel: Channel, what: str) -> tuple[str, Any]:
    """The next answer of `_serve`. what: went wrong if it is not rendered. Raises UserError."""
    try:
        kind, value = channel.receive(RENDERS_WITHIN_S)
    except TimeoutError:
        raise UserError(
            f"{what}: it did not end within {RENDERS_WITHIN_S:g} s. Correct its loop, or use "
            "another tokenizer"
        ) from None
    except PeerGone:
        raise UserError(f"{what}: the process that rendered it crashed") from None

    if kind == "fails":
        raise UserError(f"{what}: {value}")
    return kind, value


def _serve(rows: Sequence[Any], render: Callable[[Any], JSON], channel: Channel) -> None:
    """In the fork: render each row, until the first that fails."""
    for row in rows:
        kind, value = _rendered(row, render)
        try:
            channel.send(encode([kind, value]))
        except ValueError as error:
            channel.send(encode(["fails", str(error)]))

        if kind == "fails":
            return


def _rendered(row: Any, render: Callable[[Any], JSON]) -> tuple[str, JSON]:
    try:
        value = render(row)
        if isinstance(value, str):
            characters = len(value)
        else:
            characters = len(json.dumps(value, ensure_ascii=False))
    except MemoryError:
        return "fails", "it ran out of memory"
    except RowError as error:
        return "refused", str(error)
    except jinja2.TemplateError as error:
        return "refused", f"{_REFUSES}: {error}"[:1000]
    except Exception as error:  # a template can call anything it reaches
        return "refused", f"{_REFUSES}: {type(error).__name__}: {error}"[:1000]

    if characters > MAX_CHARACTERS:
        return "fails", f"a prompt becomes {characters:,} characters"
    return "rendered", value
