"""`repetition`: how much does the response repeat itself?

1 - distinct n-grams / n-grams, of words in lower case (Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning
in LLMs", arXiv 2502.03373, appendix C.2; there and in open-r1 times a negative maximum, here the part's weight).
"""

from distflow.rewards.score import Case

CASES = (
    Case("one two three four five", None, False),
    Case("one two", None, False),
    Case("and so on and so on and so on", None, False, score=1 - 3 / 7),
)


def compute_score(solution_str: str, n: int = 3, unit: str = "words") -> float:
    """From 0.0, if no n-gram occurs twice or the response has none, to almost 1.0, if it repeats one all the time.

    n: length of an n-gram, in `unit`: "words" (separated by white space) or "characters" (for scripts without it).
    Raises ValueError for an n below 1 or another unit.
    """
    if n < 1:
        raise ValueError(f"n={n}: an n-gram has 1 part or more")
    if unit not in ("words", "characters"):
        raise ValueError(f"unit={unit!r}: there are words, characters")
    text = solution_str.lower()
    parts = text.split() if unit == "words" else "".join(text.split())
    number = len(parts) - n + 1
    if number < 1:
        return 0.0
    return 1.0 - len({tuple(parts[start : start + n]) for start in range(number)}) / number
