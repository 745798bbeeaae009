"""The control words of a chat template, such as `<|im_start|>` or `[INST]`, which it writes around
messages. They are found by rendering made-up messages. Within a message's content they are a sign
of a template that is applied twice."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]

_SYSTEM = "standinsystem"
_ASKED = "standinquestion"
_REPLY = "standinreply"
_MORE = "standinmore"
_CHATS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", _ASKED),),
    (("system", _SYSTEM), ("user", _ASKED)),
    (("user", _ASKED), ("assistant", _REPLY), ("user", _MORE)),
)
_CONTENTS = re.compile("|".join((_SYSTEM, _ASKED, _REPLY, _MORE)))

_ANYWHERE = re.compile(r"<[|｜][^<>\s]{1,60}?[|｜]>|\[\|[^\[\]\s]{1,60}?\|\]")
"""Words that no ordinary text has, wherever the template writes them."""
_BESIDE = re.compile(r"\[/?[A-Z_]+\]|<</?[A-Z_]+>>|</?\w+_\w+>")
"""Words that count only directly beside a question or a system message, since a template's own text
may have them."""
_ROLE_AT_END = re.compile(r"\s*\w*\s*$")
_HAS_MARKS = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)


def control_words(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """A pattern of the control words of the tokenizer's chat template; None if it has none, like
    `User: `."""
    return _control_words(tokenizer, str(tokenizer.get_chat_template()))


@lru_cache(maxsize=16)
def _control_words(tokenizer: PreTrainedTokenizerBase, template: str) -> re.Pattern[str] | None:
    """template: the tokenizer's, which may have been replaced since the last call."""
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    known = [text for text in added if _HAS_MARKS.fullmatch(text)]
    ends = (tokenizer.bos_token, tokenizer.eos_token)
    anywhere = [
        text for text in known if text in ends or (added[text] and not _is_tag(text, known))
    ]
    found = set[str]()
    for parts in _rendered(tokenizer, template):
        for number, (text, before, after) in enumerate(parts):
            found.update(_ANYWHERE.findall(text))
            found.update(word for word in anywhere if word in text)
            if after not in ("", _REPLY):
                start = _ROLE_AT_END.sub("", text)
                found.update(
                    word for word in (*known, *_BESIDE.findall(text)) if start.endswith(word)
                )
            if before not in ("", _REPLY) and number:
                end = text.lstrip()
                found.update(
                    word for word in (*known, *_BESIDE.findall(text)) if end.startswith(word)
                )
    if not found:
        return None
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))


def _is_tag(text: str, known: Sequence[str]) -> bool:
    """Whether it is one of a pair, such as `<think>` and `</think>`, which a reply may have."""
    other = text.replace("/", "", 1) if "/" in text else f"{text[0]}/{text[1:]}"
    return other in known


def _rendered(tokenizer: Any, template: str) -> Iterator[list[tuple[str, str, str]]]:
    """The texts that the template writes before, between and after the contents of made-up chats,
    each with the content before and the one after it. A chat that the template rejects has none."""
    for chat in _CHATS:
        for prompts in (False, True):
            for has_parts in (False, True):
                messages = [
                    {
                        "role": role,
                        "content": [{"type": "text", "text": text}] if has_parts else text,
                    }
                    for role, text in chat
                ]
                try:
                    text = str(
                        tokenizer.apply_chat_template(
                            messages,
                            chat_template=template,
                            tokenize=False,
                            add_generation_prompt=prompts,
                        )
                    )
                except Exception:  # a template may reject a chat in any way
                    continue
                contents = _CONTENTS.findall(text)
                if contents:
                    texts = _CONTENTS.split(text)
                    yield [*zip(texts, ["", *contents], [*contents, ""], strict=True)]
                    break


def find_control_word(content: object, words: re.Pattern[str]) -> str:
    """The first of the words in a message's content, which may have parts; empty if there is
    none."""
    parts = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and (found := words.search(text)):
            return found[0]
    return ""


def described(word: str, template: str) -> str:
    """Why a content with this word is wrong. template: in words."""
    return (
        f"holds {word!r}, which {template} itself writes around messages: the template would be "
        "applied twice. "
        "Pass the text alone, or the messages, without any template"
    )
