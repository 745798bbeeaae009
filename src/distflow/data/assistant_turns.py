"""Finds the parts of a conversation to train on: each turn of the assistant up to the token that
ends it.

If a template marks the generated parts (`{% generation %}`, as in TRL), the marks are used.
Otherwise a turn is the text after the prompt that the template renders from the previous messages.
Both are positions in a rendered text, which must be token boundaries.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.data.chat_template import Chat, ChatTemplate
from distflow.data.messages import ASSISTANT, RowError

Turn = tuple[int, int, int]
"""(number of the assistant's turn, from 1; its start and end in the text)."""
Rendered = tuple[str, list[Turn]]
"""A conversation as text, with the turns to train on."""
_SHOWN = 40
_WINDOW = 64
_NEAR = 8
"""Tokens before a turn that are tokenised separately, and how many of the last ones must match."""


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
                f"{text[:start][-_SHOWN:]!r} and {text[start:][:_SHOWN]!r}, which would train on "
                "tokens that the model does not generate: strip white space from the turn, or use "
                "a template that adds none there"
            )
        if ids[end_place - 1] not in end_ids:
            raise RowError(
                f"{text[:end][-_SHOWN:]!r} ends turn {number} of the assistant by more than a token"
            )

        spans.append((first, end_place))

    return ids[: spans[-1][1]], spans


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
            f"{prompt[same:][:_SHOWN]!r}, and then writes {text[same:][:_SHOWN]!r} there, which "
            "would train on tokens that the model does not generate: set data.enable_thinking=true "
            "where rows hold thinking (or in a row's chat_template_kwargs), leave out what the "
            "template moves, like a system message, or use a template that marks the turns by {% "
            "generation %}"
        )

    return number, len(prompt), _end(text, len(prompt), len(text), number, ends)


def _joined(turns: list[tuple[str, Turn]]) -> list[Rendered]:
    """The fewest texts in which each turn follows its own prefix: the last one, and those that
    begin differently."""
    rendered: list[Rendered] = []
    while turns:
        text, _ = turns[-1]
        together: list[Turn] = []
        others: list[tuple[str, Turn]] = []
        for own, turn in turns:
            if text.startswith(own[: turn[2]]):
                together.append(turn)
            else:
                others.append((own, turn))

        rendered.append((text, together))
        turns = others

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
            f"{text[start:stop][-_SHOWN:]!r}, without a token that ends it ({', '.join(ends)}), so "
            "the model would not learn to stop: correct the tokenizer's eos_token"
        )
    if place == start:
        raise RowError(f"the chat template writes nothing of turn {number} of the assistant")

    rest = text[end:stop]
    for other in ends:
        rest = rest.replace(other, "")

    if rest.strip():
        raise RowError(
            f"turn {number} of the assistant continues after {text[place:end]!r}, which ends it, "
            f"with {rest.strip()[:_SHOWN]!r}: remove such a token from the text, or use a "
            "tokenizer whose template does not write one within a turn"
        )

    return end


def _next_end(text: str, start: int, ends: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the first token that ends a turn."""
    found = [(text.find(end, start), len(end)) for end in ends]
    places = [(at, at + length) for at, length in found if at >= 0]
    return min(places, default=None)
