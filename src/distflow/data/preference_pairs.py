"""Preference pairs: a prompt with a chosen and a rejected response, for a policy or for a reward
model; and the token ids of a text for a reward model, which are the same in training and in
scoring."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.builtin_names import PROMPT_MESSAGES
from distflow.data.chat_template import Chat, ChatTemplate
from distflow.data.dataset_columns import RawRow
from distflow.data.encoded_prompts import PromptRow
from distflow.data.messages import ASSISTANT, RowError, kind, read_conversation

Messages = Sequence[Mapping[str, object]]


def messages_of(extra_info: Mapping[str, object] | None, prompt: str) -> Messages:
    """The prompt's messages; a prompt that is plain text is one user message."""
    found = (extra_info or {}).get(PROMPT_MESSAGES)
    if isinstance(found, list):
        return found
    return [{"role": "user", "content": _whole(prompt)}]


def _whole(text: str) -> str:
    """The text without unpaired surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    asked: Messages,
    response: str,
    max_length: int | None = None,
    is_encoder: bool = False,
) -> tuple[list[int], int]:
    """Token ids of a prompt's messages and the response for a reward model, and how many were cut
    off: for a decoder, the first ones after the start token.

    They come from the chat template, if any; else they are prompt, response and end token, or for
    an encoder a pair."""
    response = _whole(response)
    ids = _encode(tokenizer, asked, response, is_encoder)
    cut = 0 if max_length is None else max(len(ids) - max_length, 0)
    if not cut:
        return ids, 0
    if is_encoder:
        return _encode(
            tokenizer, asked, response, is_encoder, truncation=True, max_length=max_length
        ), cut

    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return start + ids[cut + len(start) :], cut


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    asked: Messages,
    response: str,
    is_encoder: bool,
    **cut: object,
) -> list[int]:
    options: dict[str, Any] = {"return_attention_mask": False, "verbose": False, **cut}
    if tokenizer.chat_template:
        answered: list[Any] = [*asked, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(answered, tokenize=False)
        return tokenizer(text, add_special_tokens=False, **options)["input_ids"]

    prompt = "\n\n".join(str(message.get("content") or "") for message in asked)
    if is_encoder:
        return tokenizer(prompt, response, **options)["input_ids"]
    return tokenizer(prompt + response + (tokenizer.eos_token or ""), **options)["input_ids"]


def encode_pair(
    row: RawRow, tokenizer: PreTrainedTokenizerBase, names: tuple[str, str]
) -> list[PromptRow] | str:
    """The row with both texts, in a list, or why they are not a pair. Their common prefix is the
    prompt, which is computed once; each text keeps at least its last token, at which it is scored.

    names: of the columns of the chosen and the rejected response: text, or messages after the
    prompt that end with it.
    """
    texts = list[list[int]]()
    for name in names:
        asked: Any = row.extra_info[PROMPT_MESSAGES]
        found: Any = row.extra_info.get(name)
        last = found[-1] if isinstance(found, list) and found else None
        response = found
        if isinstance(last, dict):
            response = last.get("content")
            asked = [*asked, *found[:-1]]

        if not isinstance(response, str) or not response:
            what = (
                f"the response (column '{name}') is {kind(found)}, neither a text nor messages "
                "that end with one"
            )
            return f"{what}; data.chosen_key and data.rejected_key name the columns"

        if tokenizer.chat_template:
            try:
                ChatTemplate(tokenizer).check_contents(
                    [*asked, {"role": "assistant", "content": response}]
                )
            except RowError as error:
                return str(error)

        texts.append(encode_text(tokenizer, asked, response)[0])

    chosen, rejected = texts
    if chosen == rejected:
        return f"the columns '{names[0]}' and '{names[1]}' hold the same response"

    both = zip(chosen[:-1], rejected[:-1], strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
    if not same:
        return "the prompt has no tokens"

    prompt = str(tokenizer.decode(chosen[:same]))

    return [PromptRow.of(row, prompt, chosen[:same], chosen[same:], rejected_ids=rejected[same:])]


def sides_of(row: RawRow, asked: str | Chat, names: Sequence[str]) -> list[RawRow]:
    """The row with each of its responses, as rows of fine-tuning: a text after a text, or a
    conversation. Raises RowError for a response that is missing, empty or of another form.

    names: of the columns of the chosen and the rejected response, or of the labelled one."""
    keys = "data.chosen_key and data.rejected_key name the columns"
    if len(names) == 1:
        keys = "data.completion_key names the column"
    sides = list[RawRow]()
    for name in names:
        found: Any = row.extra_info.get(name)
        what = f"the response (column '{name}') is {kind(found)}"
        if not found or not isinstance(found, str | list):
            raise RowError(f"{what}, neither a text nor chat messages; {keys}")

        if isinstance(asked, Chat):
            answer = found
            if isinstance(found, str):
                answer = [{"role": ASSISTANT, "content": found}]
            messages = read_conversation([*asked.messages, *answer], name)
            sides.append(replace(row, prompt=messages, tools=asked.tools, is_conversation=True))
        elif isinstance(found, str):
            sides.append(replace(row, response=found))
        else:
            raise RowError(f"{what}, but the prompt is a text: set data.prompt_format=chat")

    return sides


def responses_of(
    row: RawRow,
    encoded: Sequence[list[PromptRow] | str],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> list[PromptRow] | str:
    """The row with its response, or with both of a pair, in a list; or why it has none. encoded:
    what became of `sides_of`."""
    sides = list[PromptRow]()
    for name, entries in zip(names, encoded, strict=True):
        num_answers = 1
        if isinstance(found := row.extra_info[name], list):
            num_answers = sum(
                isinstance(message, dict) and message.get("role") == ASSISTANT for message in found
            )

        side = entries if isinstance(entries, str) else _answers(entries, num_answers, tokenizer)
        if isinstance(side, str):
            return f"column '{name}': {side}"
        sides.append(side)

    if len(sides) == 1:
        return sides

    chosen, rejected = sides
    if chosen.prompt_ids != rejected.prompt_ids:
        return (
            "the chat template writes the prompt in two ways before the two responses: "
            f"{chosen.prompt_text[-40:]!r} and {rejected.prompt_text[-40:]!r}"
        )
    if chosen.response_ids == rejected.response_ids:
        return f"the columns '{names[0]}' and '{names[1]}' hold the same response"

    return [replace(chosen, rejected_ids=rejected.response_ids, rejected_turns=rejected.turns)]


def as_labelled(pair: PromptRow, label: str) -> list[PromptRow]:
    """A pair as two rows, of which the chosen response is desirable. label: its column."""
    rows = list[PromptRow]()
    for each, is_desirable in ((pair, True), (pair.rejected, False)):
        extra = {**(pair.extra_info or {}), label: is_desirable}
        rows.append(replace(each, rejected_ids=None, rejected_turns=None, extra_info=extra))
    return rows


def _answers(
    entries: list[PromptRow], number: int, tokenizer: PreTrainedTokenizerBase
) -> PromptRow | str:
    """The conversation with the assistant's last turns as its response: those before them belong to
    the prompt. number: of the turns."""
    last = entries[-1]
    if last.turns is None:
        return last
    if len(last.turns) < number or (len(entries) > 1 and number > 1):
        return (
            "the chat template renders its turns differently once others follow: give one message "
            "as the response"
        )

    turns = last.turns[-number:]
    start = turns[0][0]
    ids = last.response_ids or ()
    prompt_ids = last.prompt_ids + ids[:start]
    moved = tuple((begin - start, end - start) for begin, end in turns)
    text = last.prompt_text if not start else str(tokenizer.decode(prompt_ids))

    # A single turn is a response like any other.
    own_turns = None if number == 1 else moved
    return replace(
        last, prompt_ids=prompt_ids, prompt_text=text, response_ids=ids[start:], turns=own_turns
    )
