"""From rows to token ids: templates, chat messages, prompts that are too long. Each prompt is tokenised once."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from distflow.config.errors import UserError
from distflow.config.names import PROMPT_MESSAGES
from distflow.data.messages import Messages, RowError
from distflow.data.rendering import Refused, render_all, template_of
from distflow.data.rows import BadRows, RawRow
from distflow.data.sample import Segment
from distflow.data.turns import Chat, ChatTemplate, Rendered, encode_turns, render_turns
from distflow.observe.jsonlines import JSON

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_FIELDS = (
    "uid",
    "prompts",
    "prompt_ids",
    "domain",
    "ground_truth",
    "extra_info",
    "group_index",
    "episode_index",
    "agent",
)
"""The fields that exist before any node ran."""

_CHUNK_ROWS = 512
_PLACE = "{prompt}"

Ids = NDArray[np.int32]
Turns = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready for an engine.

    index: its row in the set, as tickets count. prompt_text: what was tokenised. response_ids: the response to learn,
    with the end token (SFT), else None. turns: of a conversation, where in the response the assistant's turns begin and
    end; None where all of it is one. origin: file and line.
    """

    index: int
    prompt_ids: tuple[int, ...]
    prompt_text: str
    ground_truth: JSON = None
    domain: str = "default"
    extra_info: dict[str, JSON] | None = None
    response_ids: tuple[int, ...] | None = None
    origin: str = ""
    turns: Turns | None = None

    def answer(self, version: int) -> list[Segment]:
        """The response: what is learnt as made by the policy of that version, what stands between by others."""
        ids = self.response_ids or ()
        segments, done = [], 0
        for start, end in self.turns or ((0, len(ids)),):
            if start > done:
                segments.append(Segment("environment", ids[done:start]))
            zeros = (0.0,) * (end - start)
            segments.append(Segment("policy", ids[start:end], zeros, zeros, (version,) * (end - start)))
            done = end
        return segments


@dataclass(frozen=True)
class PromptOptions:
    """The keys of `data` that turn a row into a prompt; lengths in tokens.

    prompt_format: "text", or "chat" where a text prompt becomes one user message. Lists of messages are chat always.
    prompt_template: text around a text prompt, with `{prompt}` in it, plain braces doubled.
    system_prompt: chat only; a row's own wins.
    template_kwargs: for the chat template; a row's own win.
    keep_messages: a chat's messages go along in the row's extra information, for rewards that read them.
    num_workers: threads that tokenise; 0 does it in the calling thread. The result is the same.
    pass_rate: [low, high] of the rows that are wanted, None for all. group: of the config keys, for messages.
    """

    max_prompt_length: int
    max_response_length: int
    prompt_format: str = "text"
    prompt_template: str | None = None
    system_prompt: str | None = None
    enable_thinking: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    filter_overlong: bool = True
    truncation: str = "error"
    keep_messages: bool = False
    num_workers: int = 4
    pass_rate: tuple[float, float] | None = None
    group: str = "data"


@dataclass(frozen=True)
class PromptReport:
    """What became of the rows. num_turns: of the assistant, to learn. num_texts_more: of conversations with several."""

    num_rows: int
    num_bad: int
    num_overlong_prompts: int
    num_overlong_responses: int
    num_truncated: int
    longest_prompt_tokens: int
    num_turns: int = 0
    num_texts_more: int = 0
    num_outside: int = 0

    def lines(self) -> list[str]:
        """For people: what is used, and what is left out and why."""
        counts = {
            "turns of the assistant to learn": self.num_turns,
            "rows more, of turns that the chat template writes otherwise once others follow": self.num_texts_more,
            "bad rows skipped": self.num_bad,
            "rows outside of data.pass_rate left out": self.num_outside,
            "over-long prompts left out": self.num_overlong_prompts,
            "over-long responses left out": self.num_overlong_responses,
            "cut to the longest length": self.num_truncated,
        }
        used = f"{self.num_rows:,} rows, longest prompt {self.longest_prompt_tokens} tokens"
        return [used, *(f"{number:,} {what}" for what, number in counts.items() if number)]

    @staticmethod
    def joined(parts: Sequence["PromptReport"]) -> "PromptReport":
        """Of several sets as one."""
        sums = {item.name: sum(getattr(part, item.name) for part in parts) for item in fields(PromptReport)}
        return PromptReport(**{**sums, "longest_prompt_tokens": max(part.longest_prompt_tokens for part in parts)})


class PromptSet(Sequence[PromptRow]):
    """Prompts in the order of their rows, their tokens stored flat."""

    def __init__(self, rows: Sequence[RawRow], encoded: Sequence["_Encoded"], report: PromptReport) -> None:
        assert len(rows) == len(encoded)
        self.report = report
        self._rows = list(rows)
        self._texts = [entry.text for entry in encoded]
        self._prompts = _Flat([entry.ids for entry in encoded])
        has_responses = any(entry.response_ids is not None for entry in encoded)
        self._responses = _Flat([entry.response_ids or () for entry in encoded]) if has_responses else None
        self._turns = [entry.turns for entry in encoded]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        return PromptRow(
            index=index % len(self),
            prompt_ids=self._prompts[index],
            prompt_text=self._texts[index],
            ground_truth=row.answer,
            domain=row.domain,
            extra_info=row.extra_info,
            response_ids=None if self._responses is None else self._responses[index],
            origin=row.origin,
            turns=self._turns[index],
        )

    @staticmethod
    def joined(sets: Sequence["PromptSet"]) -> "PromptSet":
        """One behind the other."""
        if len(sets) == 1:
            return sets[0]
        rows = [row for each in sets for row in each._rows]
        encoded = [entry for each in sets for entry in each._encoded()]
        return PromptSet(rows, encoded, PromptReport.joined([each.report for each in sets]))

    def _encoded(self) -> Iterator["_Encoded"]:
        for i, (text, turns) in enumerate(zip(self._texts, self._turns, strict=True)):
            response = None if self._responses is None else self._responses[i]
            yield _Encoded(text, self._prompts[i], response, turns)

    @property
    def domains(self) -> list[str]:
        """Sorted, each once."""
        return sorted({row.domain for row in self._rows})

    @property
    def has_messages(self) -> bool:
        """Whether a prompt was given as chat messages."""
        return any(not isinstance(row.prompt, str) for row in self._rows)

    @property
    def has_responses(self) -> bool:
        return self._responses is not None

    def fingerprint(self) -> str:
        """A hash of everything in the rows that a run can see: tokens, texts, answers, domains, extra information."""
        digest = hashlib.sha256()
        for part in (self._prompts, self._responses):
            digest.update(part.bytes() if part is not None else b"no responses")
        for text, row in zip(self._texts, self._rows, strict=True):
            digest.update(json.dumps([text, row.answer, row.domain, row.extra_info], sort_keys=True).encode())
        if any(self._turns):
            digest.update(json.dumps(self._turns).encode())
        return digest.hexdigest()


def encode_rows(
    rows: Sequence[RawRow],
    tokenizer: "PreTrainedTokenizerBase",
    options: PromptOptions,
    bad_rows: BadRows,
    end_ids: Collection[int] = (),
) -> PromptSet:
    """Tokenise the prompts (and responses, where the rows have them); leave out or cut those that are too long.

    A text prompt is tokenised with the tokenizer's own special tokens; a chat is rendered by its template, with the
    generation prompt, and gets none besides. Of a conversation the assistant's turns are the response; it becomes
    several rows where the template writes a turn otherwise once others follow. Rows that the template refuses, or of
    which it cannot be told what is learnt, are added to `bad_rows`. end_ids: tokens that end a turn, besides the
    tokenizer's end token.
    Raises UserError for a tokenizer without what is needed, for bad rows unless skipped, for a prompt that is too long
    with truncation "error", and where no row is left.
    """
    rows, num_outside = _within(rows, options)
    _check_options(tokenizer, rows, options)
    if options.keep_messages:
        rows = [_with_messages(row, options) for row in rows]
    encoded = _encode_all(rows, tokenizer, options, end_ids)
    good: list[tuple[RawRow, _Encoded]] = []
    for row, entries in zip(rows, encoded, strict=True):
        if isinstance(entries, str):
            bad_rows.add(row.origin, entries)
        else:
            good.extend((row, entry) for entry in entries)
    bad_rows.check()
    if not good:
        raise UserError(f"all rows are bad, and skipped; the first: {bad_rows.reasons[0]}")
    return _fit(good, tokenizer, options, len(bad_rows.reasons), num_outside)


def _within(rows: Sequence[RawRow], options: PromptOptions) -> tuple[Sequence[RawRow], int]:
    """The rows whose pass rate is wanted, and how many are not."""
    if options.pass_rate is None:
        return rows, 0
    low, high = options.pass_rate
    kept = [row for row in rows if row.pass_rate is not None and low <= row.pass_rate <= high]
    if not kept:
        rates = [row.pass_rate for row in rows if row.pass_rate is not None]
        raise UserError(
            f"{options.group}.pass_rate=[{low:g}, {high:g}]: of {len(rows):,} rows none lies within; their rates "
            f"(column {options.group}.pass_rate_key) go from {min(rates):g} to {max(rates):g}"
        )
    return kept, len(rows) - len(kept)


@dataclass(frozen=True)
class _Encoded:
    text: str
    ids: Sequence[int]
    response_ids: Sequence[int] | None = None
    turns: Turns | None = None


class _Flat:
    """Lists of token ids, end to end."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        self._values: Ids = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(self._ends[-1]))

    def __getitem__(self, index: int) -> tuple[int, ...]:
        index %= len(self._ends) - 1
        return tuple(self._values[self._ends[index] : self._ends[index + 1]].tolist())

    def bytes(self) -> bytes:
        return self._ends.tobytes() + self._values.tobytes()


def _check_options(tokenizer: "PreTrainedTokenizerBase", rows: Sequence[RawRow], options: PromptOptions) -> None:
    if options.prompt_template is not None and _PLACE not in options.prompt_template:
        raise UserError(f"data.prompt_template has no {_PLACE} in it: {options.prompt_template!r}")
    chat = options.prompt_format == "chat" or any(not isinstance(row.prompt, str) for row in rows)
    if chat and not getattr(tokenizer, "chat_template", None):
        why = "data.prompt_format=chat" if options.prompt_format == "chat" else "the prompts are chat messages"
        raise UserError(
            f"the tokenizer has no chat template, but {why}: use data.prompt_format=text with text prompts, "
            "set actor_rollout_ref.model.tokenizer_path to an instruction-tuned model, or put a chat_template.jinja "
            "into the tokenizer's folder"
        )
    if any(row.response is not None or row.is_conversation for row in rows) and tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no end token, so responses cannot end: see actor_rollout_ref.model.tokenizer_path"
        )
    if any(row.is_conversation for row in rows) and not tokenizer.is_fast:
        raise UserError(
            "the tokenizer does not tell where its tokens stand in a text, as conversations need it: use one with a "
            "tokenizer.json (actor_rollout_ref.model.tokenizer_path)"
        )
    for name in options.template_kwargs:
        if not chat or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            why = (
                f"no '{name}' is in {template_of(tokenizer)}"
                if chat
                else "the prompts are texts: see data.prompt_format"
            )
            raise UserError(f"data.apply_chat_template_kwargs.{name} does nothing: {why}")


def _encode_all(
    rows: Sequence[RawRow], tokenizer: "PreTrainedTokenizerBase", options: PromptOptions, end_ids: Collection[int]
) -> Iterator[list[_Encoded] | str]:
    """In chunks; over threads where there are several: tokenizers written in Rust let go of the interpreter.

    The threads share one tokenizer: no call asks for padding or truncation, the settings that a call would change.
    """
    ends = sorted({*end_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
    rendered = _render(rows, tokenizer, options, ends)
    starts = range(0, len(rows), _CHUNK_ROWS)

    def encode(start: int) -> list[list[_Encoded] | str]:
        chunk = slice(start, start + _CHUNK_ROWS)
        return _encode_chunk(rows[chunk], rendered[chunk], tokenizer, ends)

    if options.num_workers < 1 or len(starts) < 2:
        yield from chain.from_iterable(map(encode, starts))
        return
    with ThreadPoolExecutor(options.num_workers, thread_name_prefix="distflow-tokenise") as threads:
        yield from chain.from_iterable(threads.map(encode, starts))


@dataclass(frozen=True)
class _Prompt:
    text: str
    is_chat: bool


_Text = _Prompt | list[Rendered] | str
"""A prompt, a conversation with its turns, or why the row has no text."""


def _encode_chunk(
    rows: Sequence[RawRow], texts: Sequence[_Text], tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]
) -> list[list[_Encoded] | str]:
    """One entry a row: what it becomes, or what is wrong with it."""
    out: list[_Encoded | str] = [entry if isinstance(entry, str) else "" for entry in texts]
    for is_chat in (False, True):
        chosen = [
            (i, entry.text) for i, entry in enumerate(texts) if isinstance(entry, _Prompt) and entry.is_chat == is_chat
        ]
        special = {"add_special_tokens": False} if is_chat else {}
        tokens = _tokenise(tokenizer, [text for _, text in chosen], **special)
        for (i, text), ids in zip(chosen, tokens, strict=True):
            out[i] = _Encoded(text, ids) if ids else "the prompt has no tokens"
    answered = _with_responses(rows, out, tokenizer)
    return [
        _conversation(text, tokenizer, ends) if isinstance(text, list) else entry if isinstance(entry, str) else [entry]
        for text, entry in zip(texts, answered, strict=True)
    ]


def _conversation(
    rendered: list[Rendered], tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]
) -> list[_Encoded] | str:
    """What is before the first turn that is learnt is the prompt, the rest the response."""
    encoded = []
    for text, turns in rendered:
        try:
            ids, spans = encode_turns((text, turns), tokenizer, ends)
        except RowError as error:
            return str(error)
        first = spans[0][0]
        if not first:
            return "the prompt has no tokens"
        learnt = tuple((start - first, end - first) for start, end in spans)
        encoded.append(_Encoded(text[: turns[0][1]], ids[:first], ids[first:], learnt))
    return encoded


def _render(
    rows: Sequence[RawRow], tokenizer: "PreTrainedTokenizerBase", options: PromptOptions, ends: Collection[int]
) -> list[_Text]:
    """One entry a row. The template runs for all rows that are chats, see `render_all`."""
    template, end_texts = ChatTemplate(tokenizer), [str(tokenizer.decode([end])) for end in ends]

    def render(chat: tuple[Chat, bool]) -> JSON:
        asked, is_conversation = chat
        template.check(asked)
        if not is_conversation:
            return template.render(asked, prompts=True)
        return [[text, [list(turn) for turn in turns]] for text, turns in render_turns(asked, template, end_texts)]

    prompts = [_prompt(row, options) for row in rows]
    chats = [(entry, row.is_conversation) for entry, row in zip(prompts, rows, strict=True) if isinstance(entry, Chat)]
    rendered = render_all(chats, render, tokenizer)
    return [_Prompt(entry, False) if isinstance(entry, str) else _text(next(rendered)) for entry in prompts]


def _text(rendered: object) -> _Text:
    if isinstance(rendered, Refused):
        return str(rendered)
    if isinstance(rendered, str):
        return _Prompt(rendered, True)
    assert isinstance(rendered, list), "what `render` gave"
    return rendered


def _prompt(row: RawRow, options: PromptOptions) -> str | Chat:
    """The text as it is, or what the chat template makes a text of."""
    prompt = row.prompt
    if isinstance(prompt, str):
        if options.prompt_template is not None:
            prompt = options.prompt_template.format(prompt=prompt)
        if options.prompt_format == "text":
            return prompt
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if options.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system_prompt}, *messages]
    kwargs = {"enable_thinking": options.enable_thinking, **options.template_kwargs, **row.template_kwargs}
    return Chat(messages, row.tools, kwargs)


def _with_messages(row: RawRow, options: PromptOptions) -> RawRow:
    asked = _prompt(row, options)
    if isinstance(asked, str):
        return row
    return replace(row, extra_info={**row.extra_info, PROMPT_MESSAGES: list(asked.messages)})


def _tokenise(tokenizer: "PreTrainedTokenizerBase", texts: list[str], **settings: bool) -> list[list[int]]:
    return tokenizer(texts, return_attention_mask=False, verbose=False, **settings)["input_ids"] if texts else []


def _with_responses(
    rows: Sequence[RawRow], encoded: list[_Encoded | str], tokenizer: "PreTrainedTokenizerBase"
) -> list[_Encoded | str]:
    """Responses are tokenised apart, as an engine would have made them, and end with the end token."""
    indices = [i for i, entry in enumerate(encoded) if isinstance(entry, _Encoded) and rows[i].response is not None]
    responses = _tokenise(tokenizer, [str(rows[i].response) for i in indices], add_special_tokens=False)
    for i, ids in zip(indices, responses, strict=True):
        entry = encoded[i]
        assert isinstance(entry, _Encoded)
        ended = ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
        encoded[i] = replace(entry, response_ids=ended)
    return encoded


def _fit(
    good: list[tuple[RawRow, _Encoded]],
    tokenizer: "PreTrainedTokenizerBase",
    options: PromptOptions,
    num_bad: int,
    num_outside: int,
) -> PromptSet:
    """Leave out or cut what is too long, and count it."""
    kept: list[tuple[RawRow, _Encoded]] = []
    num_prompts = num_responses = num_truncated = 0
    for row, entry in good:
        long_prompt = len(entry.ids) > options.max_prompt_length
        long_response = len(entry.response_ids or ()) > options.max_response_length
        if (long_prompt or long_response) and options.filter_overlong:
            num_prompts += long_prompt
            num_responses += long_response and not long_prompt
            continue
        if long_prompt or long_response:
            entry = _cut(row, entry, tokenizer, options)
            num_truncated += 1
        kept.append((row, entry))
    if not kept:
        shortest = min((len(entry.ids) for _, entry in good), default=0)
        raise UserError(
            f"none of {len(good):,} rows is short enough: data.max_prompt_length={options.max_prompt_length} "
            f"(the shortest prompt has {shortest} tokens), data.max_response_length={options.max_response_length}: "
            "raise what is too small"
        )
    report = PromptReport(
        len(kept),
        num_bad,
        num_prompts,
        num_responses,
        num_truncated,
        longest_prompt_tokens=max(len(entry.ids) for _, entry in kept),
        num_turns=sum(len(entry.turns or ()) for _, entry in kept),
        num_texts_more=len(good) - len({id(row) for row, _ in good}),
        num_outside=num_outside,
    )
    return PromptSet([row for row, _ in kept], [entry for _, entry in kept], report)


def _cut(row: RawRow, entry: _Encoded, tokenizer: "PreTrainedTokenizerBase", options: PromptOptions) -> _Encoded:
    """The prompt cut by `truncation`; of a response the end is cut off, its end token with it."""
    if options.truncation == "error":
        long_prompt = len(entry.ids) > options.max_prompt_length
        part, ids = ("prompt", entry.ids) if long_prompt else ("response", entry.response_ids or ())
        raise UserError(
            f"{row.origin}: the {part} has {len(ids)} tokens, more than data.max_{part}_length="
            f"{options.max_prompt_length if long_prompt else options.max_response_length}: raise it, "
            "or set data.filter_overlong_prompts=true or data.truncation=left"
        )
    ids = truncated(entry.ids, options.max_prompt_length, options.truncation)
    text = entry.text if len(ids) == len(entry.ids) else tokenizer.decode(list(ids))
    assert isinstance(text, str)
    limit = options.max_response_length
    response = None if entry.response_ids is None else entry.response_ids[:limit]
    if response is None or entry.turns is None:
        return _Encoded(text, ids, response)
    turns = tuple((start, min(end, limit)) for start, end in entry.turns if start < limit)
    return _Encoded(text, ids, response[: turns[-1][1]], turns)


def truncated(ids: Sequence[int], max_tokens: int, side: str) -> Sequence[int]:
    """At most `max_tokens` of the ids. side: which part is cut off, "left", "right" or "middle"."""
    if len(ids) <= max_tokens:
        return ids
    if side == "left":
        return ids[len(ids) - max_tokens :]
    if side == "right":
        return ids[:max_tokens]
    assert side == "middle", side
    head = max_tokens // 2
    return [*ids[:head], *ids[len(ids) - (max_tokens - head) :]]
