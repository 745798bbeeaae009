"""Whether one name is another one misspelt: typing errors, never another word."""

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

_LEAST_SIMILARITY = 0.7  # of one word: below it, it is another word
_JOINED = 0.9  # of names whose words are divided otherwise


def most_similar(name: str, known: Mapping[str, str]) -> list[str]:
    """The value of the known name that was probably meant, or nothing. Each word must be alike: `train_batch_sise` is
    a size, `max_completion_length` is no `max_prompt_length`."""
    scored = [(score, other) for other in known if (score := _similarity(name.lower(), other.lower()))]
    return [known[max(scored)[1]]] if scored else []


def _similarity(name: str, other: str) -> float:
    """The mean over the words; 0 where one of them is another word."""
    words, others = re.split(r"[._]", name), re.split(r"[._]", other)
    if len(words) != len(others):
        joined = _ratio("".join(words), "".join(others))
        return joined if joined >= _JOINED else 0.0
    ratios = [_ratio(*pair) for pair in zip(words, others, strict=True)]
    return sum(ratios) / len(ratios) if min(ratios) >= _LEAST_SIMILARITY else 0.0


def _ratio(word: str, other: str) -> float:
    return SequenceMatcher(None, word, other).ratio()
