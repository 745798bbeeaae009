"""Whether one name is another one misspelt: typing errors, never another word."""

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
    """The mean over groups and words; 0 where one of them is another word."""
    parts, others = name.split("."), other.split(".")
    if len(parts) != len(others):
        return 0.0
    ratios = [ratio for pair in zip(parts, others, strict=True) for ratio in _ratios(*pair)]
    return sum(ratios) / len(ratios) if all(ratios) else 0.0


def _ratios(name: str, other: str) -> list[float]:
    words, others = name.split("_"), other.split("_")
    if len(words) == len(others):
        return [_ratio(word, another, _LEAST_SIMILARITY) for word, another in zip(words, others, strict=True)]
    return [_ratio("".join(words), "".join(others), _JOINED)]


def _ratio(word: str, other: str, least: float) -> float:
    ratio = SequenceMatcher(None, word, other).ratio()
    return ratio if ratio >= least else 0.0
