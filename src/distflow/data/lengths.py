"""Prompts and responses that are too long: left out or cut, and counted."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from distflow.config.errors import UserError
from distflow.data.prompts import Encoded, PromptOptions, PromptReport, PromptSet
from distflow.data.rows import RawRow


def fit(
    good: list[tuple[RawRow, Encoded]],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    num_bad: int,
    num_outside: int,
) -> PromptSet:
    """Leave out or cut what is too long, and count it."""
    kept: list[tuple[RawRow, Encoded]] = []
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


def _cut(row: RawRow, entry: Encoded, tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> Encoded:
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
        return Encoded(text, ids, response)
    turns = tuple((start, min(end, limit)) for start, end in entry.turns if start < limit)
    return Encoded(text, ids, response[: turns[-1][1]], turns)


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
