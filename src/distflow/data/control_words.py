"""The control words of a chat template, such as `<|im_start|>`, which it writes around messages:
special tokens of the tokenizer. Within a message's content they are a sign of a template that is
applied twice."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase


def control_words(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """A pattern of the special tokens that the tokenizer's chat template writes; None if it writes
    none."""
    return _control_words(tokenizer, str(tokenizer.get_chat_template()))


@lru_cache(maxsize=16)
def _control_words(tokenizer: Any, template: str) -> re.Pattern[str] | None:
    """template: the tokenizer's, which may have been replaced since the last call."""
    named = {tokenizer.bos_token: "bos_token", tokenizer.eos_token: "eos_token"}
    known = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    words = list[str]()
    for text, is_special in known.items():
        # one of a pair, such as `<think>` and `</think>`, may be in a reply
        is_tag = text.replace("</", "<", 1) in known and text.replace("<", "</", 1) in known
        is_end = text in named and named[text] in template
        if is_end or (is_special and text in template and not is_tag):
            words.append(text)
    words.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


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
