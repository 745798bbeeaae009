"""The columns of a preference pair: a prompt of its own or what both responses begin with, and
scores that contradict the pair."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from distflow.data.messages import ASSISTANT, RowError, kind
from distflow.observe.crash_safe_files import JSON

Names = tuple[str, str]
"""The columns of the chosen and of the rejected response."""


def with_prompt(values: Mapping[str, JSON], prompt: str, names: Names) -> dict[str, JSON]:
    """The row with its prompt apart from both responses: texts, or messages that begin with the
    assistant's.

    Responses that are whole conversations lose what they begin with: the prompt's messages, or
    those that both have. Texts without a prompt lose what both begin with, as in TRL. Raises
    RowError for a row without such a prompt, for one whose conversations have other prompts, and
    for one whose scores say that the responses are swapped.
    """
    chosen, rejected = (values.get(name) for name in names)
    _check_scores(values, names)
    asked = values.get(prompt)
    if isinstance(chosen, list) and isinstance(rejected, list):
        asked, answers = _split_chats(asked, chosen, rejected, prompt, names)
        return {**values, prompt: asked, names[0]: answers[0], names[1]: answers[1]}

    if asked is None and isinstance(chosen, str) and isinstance(rejected, str):
        start = _shared_text(chosen, rejected)
        if not start:
            raise RowError(
                f"the prompt (column '{prompt}') is missing, and '{names[0]}' and '{names[1]}' do "
                "not begin alike"
            )
        texts = {name: str(values[name])[len(start) :] for name in names}
        return {**values, prompt: start, **texts}

    return dict(values)


def _split_chats(
    asked: JSON, chosen: list[JSON], rejected: list[JSON], prompt: str, names: Names
) -> tuple[JSON, tuple[list[JSON], list[JSON]]]:
    """The prompt's messages, and what follows them in both responses."""
    if isinstance(asked, list):
        sides = (_after(asked, chosen), _after(asked, rejected))
    else:
        pairs = zip(chosen[:-1], rejected[:-1], strict=False)
        num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        text = asked
        asked = chosen[:num_shared]
        sides = (chosen[num_shared:], rejected[num_shared:])
        if isinstance(text, str) and not any(text.strip() in said for said in _contents(asked)):
            raise RowError(
                f"the prompt (column '{prompt}') is {kind(text)}, which is in no message that "
                f"'{names[0]}' and '{names[1]}' begin with: remove the column, or repair the row"
            )

    for name, messages in zip(names, sides, strict=True):
        first = messages[0] if messages else None
        role = first.get("role") if isinstance(first, Mapping) else None
        if role != ASSISTANT:
            raise RowError(
                f"the prompts differ: after what is common, '{name}' goes on with {kind(role)} "
                f"and not with a message of the {ASSISTANT}"
            )

    return asked, sides


def _after(asked: Sequence[JSON], messages: list[JSON]) -> list[JSON]:
    """The messages without the prompt's, if they begin with them."""
    if messages[: len(asked)] == list(asked):
        return messages[len(asked) :]
    return messages


def _contents(messages: object) -> list[str]:
    found = list[str]()
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            found.append(content)
    return found


def _shared_text(chosen: str, rejected: str) -> str:
    """What both begin with, without a space at its end, which belongs to the responses."""
    return str(commonprefix([chosen, rejected])).removesuffix(" ")


def _check_scores(values: Mapping[str, Any], names: Names) -> None:
    """Raises RowError if the row has scores of both responses, and the chosen one's is lower."""
    for form in ("score_{}", "{}_score", "{}_rating", "{}-score", "{}-rating"):
        keys = [form.format(name) for name in names]
        own, other = (values.get(key) for key in keys)
        if not isinstance(own, int | float) or not isinstance(other, int | float):
            continue
        if own < other:
            raise RowError(f"the pair is swapped: {keys[0]} is {own}, but {keys[1]} is {other}")
