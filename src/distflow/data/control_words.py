"""The control words of a chat template, such as `<|im_start|>` or `[INST]`, which it writes around
messages: special tokens of the tokenizer, and words of that form in made-up chats. Within a
message's content they are a sign of a template that is applied twice."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

_WORDS = re.compile(
    r"<[|｜][^<>\s]{1,60}?[|｜]>|\[\|[^\[\]\s]{1,60}?\|\]|\[/?[A-Z_]+\]|<</?[A-Z_]+>>|</?\w+_\w+>"
)
_CHATS = (("user",), ("system", "user"), ("user", "assistant", "user"))


def control_words(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """A pattern of the control words of the tokenizer's chat template; None if it has none, like
    `User: `."""
    return _control_words(tokenizer, str(tokenizer.get_chat_template()))


@lru_cache(maxsize=16)
def _control_words(tokenizer: Any, template: str) -> re.Pattern[str] | None:
    """template: the tokenizer's, which may have been replaced since the last call."""
    named = {tokenizer.bos_token: "bos_token", tokenizer.eos_token: "eos_token"}
    known = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}

    words = set(_WORDS.findall(_rendered(tokenizer, template)))
    for text, is_special in known.items():
        # one of a pair, such as `<think>` and `</think>`, may be in a reply
        if "</" in text:
            other = text.replace("</", "<", 1)
        else:
            other = text.replace("<", "</", 1)

        is_tag = other != text and other in known
        is_end = text in named and named[text] in template
        if is_end or (is_special and text in template and not is_tag):
            words.add(text)

    if not words:
        return None
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


def _rendered(tokenizer: Any, template: str) -> str:
    """Made-up chats as the template writes them, without those that it rejects."""
    texts = list[str]()
    for roles in _CHATS:
        for content in ("text", [{"type": "text", "text": "text"}]):
            messages = [{"role": role, "content": content} for role in roles]
            with suppress(Exception):  # a template may reject a chat in any way
                rendered = tokenizer.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=True
                )
                texts.append(str(rendered))

    return "\n".join(texts)


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
        "applied twice. Pass the text alone, or the messages, without any template"
    )
