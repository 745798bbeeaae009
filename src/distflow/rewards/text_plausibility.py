"""Is a response a text? A few signs follow most of IFEval's instructions: `* a` is a list, `{}` is JSON.

A text has at least `MIN_WORDS` different words, with `MIN_BYTES` letters in total, besides those that its instructions
force (a keyword, the phrase at its end); a tenth of that if few words are allowed. At most every other word is the
same, n words have at least √(2n) different ones, and at least a third of the characters are letters or digits. Five
Latin words have 2.25 letters on average, and one of nine has four. A word has two letters and a vowel; in non-Latin
scripts any letters form a word, and in scripts without spaces (Chinese, Thai) any two neighbours.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

MIN_WORDS, MIN_BYTES = 3, 10
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]+"
)
_VOWEL = re.compile("[aeiouy]")
_RUN = re.compile(r"\w+")
_CONTENT = re.compile(r"[A-Za-z]{2}|\d|[^\W\d_A-Za-z]")
_LITERAL = ("prompt_to_repeat", "end_phrase", "first_word")
_PATTERNS = ("keyword", "keywords", "postscript_marker", "section_spliter")

_BETWEEN = {
    "length_constraints:number_paragraphs": r"\*\*\*",
    "length_constraints:nth_paragraph_first_word": r"\n\n",
    "combination:two_responses": r"\*{6}",
}
_BEFORE = {
    "detectable_content:postscript": r"(?i){postscript_marker}",
    "detectable_format:multiple_sections": r"\s?{section_spliter}\s?\d+",
}
_AROUND = {
    "detectable_content:number_placeholders": r"\[([^\[\]\n]*)\]",
    "detectable_format:number_bullet_lists": r"(?m)^[^\S\n]*+[-*](.*)$",
    "detectable_format:number_highlighted_sections": r"(?<=\*)[^\n*]+(?=\*)",
    "detectable_format:title": r"<<([^\n<>]*)>>",
}
"""By instruction, what is between, before or around the requested parts."""

_ONE_OF = re.compile(r"My answer is (?:yes|no|maybe)\.")
_JSON_TREE = re.compile(r"\s*(?:```(?:json)?\s*)?[\[{]", re.IGNORECASE)

_COUNTED = {"length_constraints:number_words": "num_words", "keywords:letter_frequency": "let_frequency"}


def has_parts(instruction: str, response: str, arguments: Mapping[str, object]) -> bool:
    """Whether as many parts as requested, e.g. list items, are non-empty and distinct, paragraphs have two words or
    more, and half of the requested words or letters are in words. Of the options one is chosen, JSON is an object or a
    list, and the repeated prompt is followed by a word that it lacks."""
    if instruction in _COUNTED and "at least" in arguments.values():
        words = list(_words(response))
        counted = "".join(words).count(str(arguments["letter"])) if "letter" in arguments else len(words)
        return 2 * counted >= int(str(arguments[_COUNTED[instruction]]))
    if instruction == "detectable_format:constrained_response":
        return len(set(_ONE_OF.findall(response))) == 1
    if instruction == "detectable_format:json_format":
        return _JSON_TREE.match(response) is not None
    if instruction == "combination:repeat_prompt":
        return not {*_words(_unforced(response, [arguments]))} <= {*_words(str(arguments["prompt_to_repeat"]))}
    if instruction in _AROUND:
        parts = re.findall(_AROUND[instruction], response)
    elif instruction in _BETWEEN:
        parts = re.split(_BETWEEN[instruction], response)
    elif instruction in _BEFORE:
        marker = str(arguments.get("postscript_marker", "")).rstrip(".")
        forms = {**arguments, "postscript_marker": re.escape(marker).replace(r"\.", r"\.\s?") + r"\.?"}
        parts = re.split(_BEFORE[instruction].format(**forms), response)[1:]
    else:
        return True
    wanted = [value for name, value in arguments.items() if name.startswith("num_")]
    wanted = wanted or [2 if instruction in _BETWEEN else 1]
    found = [" ".join(_RUN.findall(_unforced(part or "", [arguments]))) for part in parts]
    is_content = _CONTENT.search if instruction not in _BETWEEN else _has_words
    filled = [part for part in found if is_content(part)]
    return len(filled if "placeholders" in instruction else set(filled)) >= int(str(wanted[0]))


def _has_words(part: str) -> bool:
    words = {*_words(part)}
    return len(words) > 1 or any(len(word) > 3 for word in words)


def is_text(response: str, arguments: Sequence[Mapping[str, object]]) -> bool:
    """arguments: of the response's instructions; forced words do not count."""
    if 3 * sum(map(str.isalnum, response)) < len("".join(response.split())):
        return False
    counts = Counter(_words(_unforced(response, arguments)))
    different, total = len(counts), counts.total()
    bounded = [entry.get("num_words", 99) for entry in arguments if entry.get("relation") == "less than"]
    least = min([MIN_WORDS, *(max(-(-int(str(limit)) // 10), 1) for limit in bounded)])
    if different < least or (least == MIN_WORDS and len("".join(counts).encode("utf-8", "replace")) < MIN_BYTES):
        return False
    lengths = [len(word) for word in counts.elements() if word.isascii()]
    if (len(lengths) >= 5 and sum(lengths) < 2.25 * len(lengths)) or (len(lengths) > 8 and max(lengths) < 4):
        return False
    return total == different or 2 * max(counts.values()) <= total <= different**2 / 2


def _unforced(text: str, arguments: Iterable[Mapping[str, object]]) -> str:
    """The text without words that the instructions force, in lower case."""
    for name, value in (item for entry in arguments for item in entry.items()):
        patterns = value if isinstance(value, list) else [re.escape(str(value)) if name in _LITERAL else str(value)]
        for pattern in patterns if name in (*_LITERAL, *_PATTERNS) else ():
            text = re.sub(pattern, " ", text, flags=re.IGNORECASE)
    return text.casefold()


def _words(text: str) -> Iterator[str]:
    plain = unicodedata.normalize("NFD", text.casefold())
    plain = "".join(
        each if each.isalpha() else "" if unicodedata.category(each).startswith("M") else " " for each in plain
    )
    for run in plain.split():
        if run.isascii():
            if len(run) > 1 and len(set(run)) > 1 and _VOWEL.search(run):
                yield run
        elif _WITHOUT_SPACES.fullmatch(run):
            yield from (run[i : i + 2] for i in range(len(run) - 1))
        else:
            yield run
