"""Renders chat templates in a process that can be killed, since a template is third-party code that
may never end, and finds the parts of a conversation to train on: each turn of the assistant up to
the token that ends it.

If a template marks the generated parts (`{% generation %}`, as in TRL), the marks are used.
Otherwise a turn is the text after the prompt that the template renders from the previous messages.
Both are positions in a rendered text, which must be token boundaries.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
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

Turn = tuple[int, int, int]
"""(number of the assistant's turn, from 1; its start and end in the text)."""
Rendered = tuple[str, list[Turn]]
"""A conversation as text, with the turns to train on."""

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 40
_WINDOW = 64
_NEAR = 8
"""Tokens before a turn that are tokenised separately, and how many of the last ones must match."""


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
        for name, used in (
            ("tools", chat.tools),
            ("tool_calls", any("tool_calls" in m for m in chat.messages)),
        ):
            if used and not re.search(rf"\b{name}\b", self._text(chat)):
                raise RowError(
                    (
                        f"the chat template does not use {name}, but the row has some: use a model "
                        "whose template does"
                    )
                    + (
                        ""
                        if name == "tool_calls"
                        else ", or name another column with data.tools_key"
                    )
                )
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


def render_turns(chat: Chat, template: ChatTemplate, ends: Sequence[str]) -> list[Rendered]:
    """The conversation with its turns; several texts if the template writes a turn differently once
    others follow.

    ends: texts of the tokens that end a turn. Raises RowError if the trained part cannot be
    determined.
    """
    places = [place for place, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
    prompts = [template.render(chat, place, prompts=True) for place in places]
    if marked := template.render_marked(chat):
        return [_marked(*marked, prompts, ends)]
    turns = []
    for number, (place, prompt) in enumerate(zip(places, prompts, strict=True), 1):
        text = template.render(chat, place + 1, prompts=False)
        turns.append((text, _turn_after(prompt, text, number, ends)))
    return _joined(turns)


def encode_turns(
    rendered: Rendered, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids up to the end of the last turn, and the position of each turn in them.

    The whole text is tokenised at once. Raises RowError if the tokens before a turn are not those
    with which the model would be prompted, i.e. of the text before the turn alone.
    """
    text, turns = rendered
    encoding: Any = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids = encoding["input_ids"]
    begins = [begin for begin, _ in encoding["offset_mapping"]]
    spans = []
    for number, start, end in turns:
        first = bisect_left(begins, start)
        end_place = bisect_left(begins, end)
        if not _is_prompted(text[:start], ids[:first], begins, tokenizer):
            raise RowError(
                f"turn {number} of the assistant begins inside a token, between "
                f"{text[:start][-_SHOWN:]!r} and "
                f"{text[start:][:_SHOWN]!r}, which would train on tokens that the model does not "
                "generate: strip "
                "white space from the turn, or use a template that adds none there"
            )
        if ids[end_place - 1] not in end_ids:
            raise RowError(
                f"{text[:end][-_SHOWN:]!r} ends turn {number} of the assistant by more than a token"
            )
        spans.append((first, end_place))
    return ids[: spans[-1][1]], spans


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
        characters = (
            len(value) if isinstance(value, str) else len(json.dumps(value, ensure_ascii=False))
        )
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


def _is_prompted(
    text: str, ids: list[int], begins: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Whether these are the tokens of the text alone. Following text usually changes tokens at the
    end, so the end is compared first, which keeps the cost linear for long conversations."""
    near = _ids(tokenizer, text[begins[max(len(ids) - _WINDOW, 0)] :])
    last = ids[-_NEAR:]
    return near[-len(last) :] == last or _ids(tokenizer, text) == ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    encoding: Any = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(encoding["input_ids"])


def _turn_after(prompt: str, text: str, number: int, ends: Sequence[str]) -> Turn:
    """The turn at the end of the text, after its prompt."""
    if not text.startswith(prompt):
        same = len(commonprefix([prompt, text]))
        raise RowError(
            f"the chat template prompts turn {number} of the assistant by "
            f"{prompt[same:][:_SHOWN]!r}, and then writes "
            f"{text[same:][:_SHOWN]!r} there, which would train on tokens that the model does not "
            "generate: set "
            "data.enable_thinking=true where rows hold thinking (or in a row's "
            "chat_template_kwargs), leave out what "
            "the template moves, like a system message, or use a template that marks the turns by "
            "{% generation %}"
        )
    return number, len(prompt), _end(text, len(prompt), len(text), number, ends)


def _joined(turns: list[tuple[str, Turn]]) -> list[Rendered]:
    """The fewest texts in which each turn follows its own prefix: the last one, and those that
    begin differently."""
    rendered: list[Rendered] = []
    while turns:
        text, _ = turns[-1]
        same = [text.startswith(own[:end]) for own, (_, _, end) in turns]
        rendered.append((text, [turn for (_, turn), fits in zip(turns, same, strict=True) if fits]))
        turns = [turn for turn, fits in zip(turns, same, strict=True) if not fits]
    return rendered[::-1]


def _marked(
    text: str, blocks: Sequence[tuple[int, int]], prompts: Sequence[str], ends: Sequence[str]
) -> Rendered:
    """The turns by the template's own marks, without the prompt, but with the token that ends
    them."""
    begun = [
        (number, len(prompt)) for number, prompt in enumerate(prompts, 1) if text.startswith(prompt)
    ]
    turns: list[Turn] = []
    for start, stop in blocks:
        number, prompted = max((own for own in begun if own[1] < stop), default=(0, 0))
        closed = _next_end(text, prompted, ends)
        if len(begun) == len(prompts) and not (number and (closed is None or start < closed[0])):
            raise RowError(
                f"the chat template marks {text[start:stop][:_SHOWN]!r} as generated, but it is in "
                "no turn"
            )
        start = max(start, prompted)
        turns.append((number or len(turns) + 1, start, _end(text, start, stop, number, ends)))
    if not turns:
        raise RowError(
            "the chat template marks nothing of it as generated: see its {% generation %} blocks"
        )
    return text, turns


def _end(text: str, start: int, stop: int, number: int, ends: Sequence[str]) -> int:
    """The end of the turn in text[start:stop]: after the first token that ends it, at the latest
    the one at `stop`."""
    place, end = _next_end(text, start, ends) or (len(text) + 1, 0)
    if place > stop:
        raise RowError(
            f"the chat template ends turn {number} of the assistant by "
            f"{text[start:stop][-_SHOWN:]!r}, without a token "
            f"that ends it ({', '.join(ends)}), so the model would not learn to stop: correct the "
            "tokenizer's "
            "eos_token"
        )
    if place == start:
        raise RowError(f"the chat template writes nothing of turn {number} of the assistant")
    rest = text[end:stop]
    for other in ends:
        rest = rest.replace(other, "")
    if rest.strip():
        raise RowError(
            f"turn {number} of the assistant continues after {text[place:end]!r}, which ends it, "
            "with "
            f"{rest.strip()[:_SHOWN]!r}: remove such a token from the text, or use a tokenizer "
            "whose template does "
            "not write one within a turn"
        )
    return end


def _next_end(text: str, start: int, ends: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the first token that ends a turn."""
    return min(
        ((at, at + len(end)) for end in ends if (at := text.find(end, start)) >= 0), default=None
    )
