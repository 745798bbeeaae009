"""Converts rows to token ids: templates, chat messages, responses; each prompt is tokenised once.
Prompts and responses that are too long are left out or cut, and counted."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

from transformers import PreTrainedTokenizerBase

from distflow.builtin_names import PROMPT_CHAT, PROMPT_MESSAGES
from distflow.data.assistant_turns import Rendered, encode_turns, render_turns
from distflow.data.chat_template import Chat, ChatTemplate, Refused, render_all, template_of
from distflow.data.dataset_columns import BadRows, RawRow
from distflow.data.encoded_prompts import (
    PromptOptions,
    PromptReport,
    PromptRow,
    PromptSet,
    UnusableRow,
)
from distflow.data.images import IMAGE_MARK, encoder_of, parts_of
from distflow.data.messages import Messages, RowError
from distflow.data.preference_pairs import as_labelled, encode_pair, responses_of, sides_of
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON


def fit(
    good: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    report: PromptReport,
) -> PromptSet:
    """Leave out or cut rows that are too long, and count them. report: the counts so far."""
    kept: list[PromptRow] = []
    num_prompts = 0
    num_responses = 0
    num_truncated = 0
    for row in good:
        long_prompt = len(row.prompt_ids) > options.max_prompt_length
        long_response = len(row.longest_response) > options.max_response_length
        if not (long_prompt or long_response):
            kept.append(row)
        elif not options.filter_overlong:
            kept.append(_cut(row, tokenizer, options))
            num_truncated += 1
        elif long_prompt:
            num_prompts += 1
        else:
            num_responses += 1

    if not kept:
        shortest = min((len(row.prompt_ids) for row in good), default=0)
        raise UnusableRow(
            "overlong",
            f"none of {len(good):,} rows is short enough: "
            f"data.max_prompt_length={options.max_prompt_length} (the shortest prompt has "
            f"{shortest} tokens), data.max_response_length={options.max_response_length}: raise "
            "the limit",
        )

    report = replace(
        report,
        num_rows=len(kept),
        num_overlong_prompts=num_prompts,
        num_overlong_responses=num_responses,
        num_truncated=num_truncated,
        longest_prompt_tokens=max(len(row.prompt_ids) for row in kept),
        num_turns=sum(len(row.turns or ()) for row in kept),
    )
    return PromptSet(kept, report)


def _cut(row: PromptRow, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> PromptRow:
    """The prompt cut by `truncation`; a response loses its end, including the end token."""
    # A score belongs to a whole text, and an image to all of its placeholders.
    is_whole = row.rejected_ids is not None or bool(row.images)
    if options.truncation == "error" or is_whole:
        raise _too_long(row, options, is_whole)

    prompt_ids = truncated(row.prompt_ids, options.max_prompt_length, options.truncation)
    text = row.prompt_text
    if len(prompt_ids) < len(row.prompt_ids):
        text = str(tokenizer.decode(list(prompt_ids)))

    limit = options.max_response_length
    turns = row.turns
    if turns is not None:
        turns = tuple((start, min(end, limit)) for start, end in turns if start < limit)
        limit = turns[-1][1]

    return replace(
        row,
        prompt_text=text,
        prompt_ids=prompt_ids,
        response_ids=None if row.response_ids is None else row.response_ids[:limit],
        turns=turns,
    )


def _too_long(row: PromptRow, options: PromptOptions, is_whole: bool) -> UserError:
    part = "response"
    num_tokens = len(row.longest_response)
    limit = options.max_response_length
    if len(row.prompt_ids) > options.max_prompt_length:
        part = "prompt"
        num_tokens = len(row.prompt_ids)
        limit = options.max_prompt_length

    advice = "raise it, or set data.filter_overlong_prompts=true"
    if not is_whole:
        advice += " or data.truncation=left"
    return UserError(
        f"{row.origin}: the {part} has {num_tokens} tokens, more than "
        f"data.max_{part}_length={limit}: {advice}"
    )


def truncated(ids: tuple[int, ...], max_tokens: int, side: str) -> tuple[int, ...]:
    """At most `max_tokens` of the ids. side: which part is cut off, "left", "right" or "middle"."""
    if len(ids) <= max_tokens:
        return ids
    head = {"left": 0, "middle": max_tokens // 2, "right": max_tokens}[side]
    return ids[:head] + ids[len(ids) - (max_tokens - head) :]


_CHUNK_ROWS = 512


def encode_rows(
    rows: Sequence[RawRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    bad_rows: BadRows,
    end_ids: Collection[int] = (),
) -> PromptSet:
    """Tokenise the prompts (and responses, if the rows have them); leave out or cut those that are
    too long.

    A text prompt is tokenised with the tokenizer's own special tokens; a chat is rendered by its
    template, with the generation prompt, without further special tokens. The response of a
    conversation is the assistant's turns; it becomes several rows if the template writes a turn
    differently once others follow. Rows that the template rejects, or whose trained part cannot be
    determined, are added to `bad_rows`. end_ids: tokens that end a turn, besides the tokenizer's
    end token. Raises UserError for a tokenizer that lacks a template or an end token, for bad rows
    unless skipped, for a prompt that is too long with truncation "error", and if no row is left.
    """
    _check_options(tokenizer, rows, options)
    rows = [_with_messages(row, options) for row in rows]

    encoded: Iterator[_Entries]
    if options.pair and options.scores_pairs:
        names = options.pair
        encoded = (encode_pair(row, tokenizer, names) for row in rows)
    elif options.pair:
        encoded = _encode_responses(rows, options.pair, tokenizer, options, end_ids)
    else:
        encoded = _encode_all(rows, tokenizer, options, end_ids)

    good: list[PromptRow] = []
    num_texts_more = 0
    for row, found in zip(rows, encoded, strict=True):
        if isinstance(found, str):
            bad_rows.add(row.origin, found)
        else:
            good.extend(found)
            if options.labelled is None:  # else a pair is two rows
                num_texts_more += len(found) - 1

    bad_rows.check()
    if not good:
        raise UnusableRow(
            "bad_row", f"all rows are bad and were skipped; the first: {bad_rows.reasons[0]}"
        )

    report = PromptReport(num_bad=len(bad_rows.reasons), num_texts_more=num_texts_more)
    return fit(good, tokenizer, options, report)


_Entries = list[PromptRow] | str
"""A row's encoded rows (several for some conversations), or why there are none."""


def _check_options(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[RawRow], options: PromptOptions
) -> None:
    where = "actor_rollout_ref.model.tokenizer_path"
    is_chat = any(_is_chat(row, options) for row in rows)
    if is_chat and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the tokenizer has no chat template, but the prompts are chat messages or "
            f"data.prompt_format=chat: use data.prompt_format=text with text prompts, set {where} "
            "to an instruction-tuned model, or put a chat_template.jinja into the tokenizer's "
            "folder"
        )

    has_responses = any(row.response is not None or row.is_conversation for row in rows)
    if has_responses and tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer has no end token, so responses cannot end: see {where}")
    if any(row.is_conversation for row in rows) and not tokenizer.is_fast:
        raise UserError(
            "the tokenizer does not give the positions of tokens in a text, which conversations "
            f"need: use one with a tokenizer.json ({where})"
        )
    if options.pair and any(row.images for row in rows):
        raise UserError(
            "preference pairs with images cannot be trained on: set data.image_key=null"
        )

    for name in options.template_kwargs:
        unused = f"data.apply_chat_template_kwargs.{name} does nothing"
        if not is_chat:
            raise UserError(f"{unused}: the prompts are plain text: see data.prompt_format")
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise UserError(f"{unused}: no '{name}' is in {template_of(tokenizer)}")


def _encode_all(
    rows: Sequence[RawRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    end_ids: Collection[int],
) -> Iterator[_Entries]:
    """Encode in chunks, over threads if there are several: tokenizers written in Rust release the
    interpreter's lock.

    The threads share one tokenizer: no call asks for padding or truncation, which would change its
    settings.
    """
    ends = set(end_ids)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    in_order = sorted(ends)
    texts = _render(rows, tokenizer, options, in_order)
    starts = range(0, len(rows), _CHUNK_ROWS)

    def encode(start: int) -> list[_Entries]:
        chunk = slice(start, start + _CHUNK_ROWS)
        return _encode_chunk(rows[chunk], texts[chunk], tokenizer, options, in_order)

    if options.num_workers < 1 or len(starts) < 2:
        yield from chain.from_iterable(map(encode, starts))
        return

    with ThreadPoolExecutor(options.num_workers, thread_name_prefix="distflow-tokenise") as threads:
        yield from chain.from_iterable(threads.map(encode, starts))


def _encode_responses(
    rows: Sequence[RawRow],
    names: tuple[str, str],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    end_ids: Collection[int],
) -> Iterator[_Entries]:
    """Encode both responses of each pair, or the labelled one, as those of fine-tuning are, behind
    the same prompt."""
    sides = list[RawRow]()
    faults = dict[int, str]()
    names_of = list[tuple[str, ...]]()
    for place, row in enumerate(rows):
        is_pair = options.labelled is None or names[0] in row.extra_info
        names_of.append(names if is_pair else (options.labelled or ())[:1])
        try:
            sides += sides_of(row, _prompt(row, options), names_of[place])
        except RowError as error:
            faults[place] = str(error)

    _check_options(tokenizer, sides, options)
    encoded = _encode_all(sides, tokenizer, options, end_ids)
    for place, row in enumerate(rows):
        if place in faults:
            yield faults[place]
            continue

        own = [next(encoded) for _ in names_of[place]]
        found = responses_of(row, own, names_of[place], tokenizer)
        if options.labelled is not None and len(own) > 1 and not isinstance(found, str):
            yield as_labelled(found[0], options.labelled[1])
        else:
            yield found


_Text = str | Refused | list[Rendered]
"""A prompt, the reason why the row has none, or a conversation with its turns."""


def _encode_chunk(
    rows: Sequence[RawRow],
    texts: Sequence[_Text],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    ends: Collection[int],
) -> list[_Entries]:
    """One entry per row."""
    encoded: dict[int, _Entries] = {}
    prompts: dict[int, str] = {}
    for i, text in enumerate(texts):
        if isinstance(text, Refused):
            encoded[i] = str(text)
        elif isinstance(text, str):
            prompts[i] = text
        else:
            encoded[i] = _encode_conversation(rows[i], text, tokenizer, ends)

    responses = _response_ids(rows, prompts, tokenizer)
    for is_chat in (False, True):
        chosen = [i for i in prompts if _is_chat(rows[i], options) == is_chat]
        special = {"add_special_tokens": False} if is_chat else {}

        tokens = _tokenise(tokenizer, [prompts[i] for i in chosen], **special)
        for i, ids in zip(chosen, tokens, strict=True):
            try:
                ids = _with_images(rows[i], prompts[i], ids, tokenizer, **special)
            except ValueError as error:
                encoded[i] = str(error)
                continue

            if ids:
                encoded[i] = [PromptRow.of(rows[i], prompts[i], ids, responses.get(i))]
            else:
                encoded[i] = "the prompt has no tokens"

    return [encoded[i] for i in range(len(texts))]


def _with_images(
    row: RawRow, text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase, **special: bool
) -> list[int]:
    """The ids of a prompt with the placeholders of its images. Raises RowError if it cannot have
    both."""
    processor = encoder_of(tokenizer)
    if processor is None:
        return ids
    if row.images:
        return processor.encode(text, row.images, **special)
    if processor.token_id in ids:
        raise RowError(
            f"the prompt has the text {processor.mark!r}, which stands for an image, but no image"
        )

    return ids


def _encode_conversation(
    row: RawRow,
    rendered: list[Rendered],
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
) -> _Entries:
    """The prompt ends where the first trained turn begins; the rest is the response."""
    encoded: list[PromptRow] = []
    for text, turns in rendered:
        try:
            ids, spans = encode_turns((text, turns), tokenizer, ends)
        except RowError as error:
            return str(error)

        first = spans[0][0]
        if not first:
            return "the prompt has no tokens"

        prompt = text[: turns[0][1]]
        learnt = tuple((start - first, end - first) for start, end in spans)
        encoded.append(PromptRow.of(row, prompt, ids[:first], ids[first:], turns=learnt))

    return encoded


def _render(
    rows: Sequence[RawRow],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    ends: Collection[int],
) -> list[_Text]:
    """One entry per row. The template runs for all rows that are chats, see `render_all`."""
    template = ChatTemplate(tokenizer, options.has_own_replies)
    end_texts = [str(tokenizer.decode([end])) for end in ends]

    def render(chat: tuple[Chat, bool, str]) -> JSON:
        asked, is_conversation, response = chat
        template.check(asked, response)
        if not is_conversation:
            return template.render(asked, prompts=True)

        texts: list[JSON] = []
        for text, turns in render_turns(asked, template, end_texts):
            texts.append([text, [list(turn) for turn in turns]])
        return texts

    prompts = [_with_marks(_prompt(row, options), row, tokenizer) for row in rows]
    end = str(tokenizer.eos_token or "")

    chats: list[tuple[Chat, bool, str]] = []
    for prompt, row in zip(prompts, rows, strict=True):
        if isinstance(prompt, Chat):
            response = (row.response or "").removesuffix(end)
            chats.append((prompt, row.is_conversation, response))

    rendered = render_all(chats, render, tokenizer)
    return [prompt if isinstance(prompt, str) else next(rendered) for prompt in prompts]


def _with_marks(prompt: str | Chat, row: RawRow, tokenizer: PreTrainedTokenizerBase) -> str | Chat:
    """The prompt with its places of images as the model's text, or its chat template, has them."""
    processor = encoder_of(tokenizer)
    if not row.images or processor is None:
        return prompt
    if isinstance(prompt, str):
        return prompt.replace(IMAGE_MARK, processor.mark)

    messages: Messages = []
    for message in prompt.messages:
        text = str(message.get("content"))
        if IMAGE_MARK in text:
            message = {**message, "content": parts_of(text)}
        messages.append(message)

    return replace(prompt, messages=messages)


def _is_chat(row: RawRow, options: PromptOptions) -> bool:
    """Whether the row's prompt goes through the chat template, which writes special tokens
    itself."""
    return options.prompt_format == "chat" or not isinstance(row.prompt, str)


def _prompt(row: RawRow, options: PromptOptions) -> str | Chat:
    """The text, or the values for the chat template."""
    messages: Messages
    if isinstance(row.prompt, str):
        text = row.prompt
        if options.prompt_template is not None:
            text = options.prompt_template.format(prompt=text)
        if options.prompt_format == "text":
            return text
        messages = [{"role": "user", "content": text}]
    else:
        messages = row.prompt

    if options.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system_prompt}, *messages]
    kwargs = {
        "enable_thinking": options.enable_thinking,
        **options.template_kwargs,
        **row.template_kwargs,
    }

    return Chat(messages, row.tools, kwargs)


def _with_messages(row: RawRow, options: PromptOptions) -> RawRow:
    """The row with the messages that are kept for reward functions and workflows."""
    columns: list[str] = []
    if options.keep_messages:
        columns.append(PROMPT_MESSAGES)
    if options.keep_chats and _is_chat(row, options):
        columns.append(PROMPT_CHAT)
    if not columns:
        return row

    asked = _prompt(row, options)
    messages: list[JSON] = []
    if isinstance(asked, Chat):
        messages += asked.messages
    else:
        messages.append({"role": "user", "content": asked})

    return replace(row, extra_info={**row.extra_info, **dict.fromkeys(columns, messages)})


def _tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], **settings: bool
) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, return_attention_mask=False, verbose=False, **settings)["input_ids"]


def _response_ids(
    rows: Sequence[RawRow], indices: Iterable[int], tokenizer: PreTrainedTokenizerBase
) -> dict[int, list[int]]:
    """Responses are tokenised separately, as an engine generates them, and end with the end
    token."""
    answered = [i for i in indices if rows[i].response is not None]
    end = tokenizer.eos_token_id
    responses = _tokenise(
        tokenizer, [str(rows[i].response) for i in answered], add_special_tokens=False
    )

    found: dict[int, list[int]] = {}
    for i, ids in zip(answered, responses, strict=True):
        is_ended = bool(ids) and ids[-1] == end
        found[i] = ids if is_ended else [*ids, end]

    return found
