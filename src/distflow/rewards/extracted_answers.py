"""Finding the final answer in a text: the last complete box, the text after the last `####`, or an
"answer is" phrase.

Adjacent boxes are one answer, a list: a response that boxes two answers has not decided. Each
search takes linear time, since the policy writes the text.
"""

import html
import json
import re
from collections.abc import Callable

from distflow.rewards.denied_answers import clause_before, is_denied

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_BOX = re.compile(r"[^\s${}\\]+")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$.,;:()&/|~*]|\\[()\[\],;!\\]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*",
    re.IGNORECASE,
)
_PHRASE = re.compile(
    r"(?:(?<!/)\b(?:answer|correct (?:option|choice))\b[^\n.:=]{0,60}?(?:\bis\b|[:=])|\banswers "
    r"are\b|答案[是为：:]"
    r"|<answer>)(?:\*\*(?!\*)|[\s:])*",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!]\s+(?=[A-Z])|(?<=\?)\s+(?=[A-Z])")
_TAGS = "a|b|big|center|code|div|em|font|h[1-6]|i|kbd|label|li|mark|p|pre|samp|small|span|strong|td|tt|u|var"  # noqa: E501
_CLOSED_TAG = re.compile(rf"</({_TAGS})\s*>", re.I)
_BREAK = re.compile(r"<[bh]r\b[^<>]*>", re.I)
_SIGN = re.compile("[\u2600-\u27bf\U0001f300-\U0001faff]\ufe0f?")
"""A tick, a star or another picture."""
_STRUCK = re.compile(r"~~(?=\S)[^~\n]+~~")
_SUPERSCRIPT = re.compile(r"<sup>([^<>]*)</sup>", re.I)
_ENTITY = re.compile(r"&#?\w{2,8};")
_EMPHASIS = re.compile(
    r"(?<![^\W_])(?<![\\*)\]}])(\*+|_+|`+|\")(?=\S)([^*_`\"\n]+)(?<=\S)\1(?![^\W_]|[*({\\])"
)
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\[((?:[^\\]|\\[^\[\]])+)\\\]|\\\(((?:[^\\]|\\[^()])+)\\\)"
)
_NUMBER = r"-?\$?(?:\d{1,3}(?:[, _']\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][+-]?\d+)?"
_UNIT = r"\s?(?:\\?%|°|(?!but\b)[A-Za-z]+(?:\^\d|[²³])?(?:/[A-Za-z]+)?)"
_FUNCTIONS = r"sqrt|exp|ln|log|(?:arc)?(?:sin|cos|tan)h?"
_NAMES = r"pi|oo|infinity|inf"
_CALL = rf"(?:\\?(?:{_FUNCTIONS})\s?\([^()\n]*\)|√\(?\d+\)?)"
_NAME = rf"(?:\\?(?:{_NAMES}|infty)(?![A-Za-z])|e(?=\^)|[π∞])"
_TERM = rf"(?:{_CALL}|\(?{_NUMBER}\)?|{_NAME})"
# after a number: 2π, 3i
_FACTOR = rf"\s?(?:{_CALL}|{_NAME}|(?<=\S)[ie](?![\w'’])|i(?=\s*[-+).,;:!?]|\s*$))"
_SUM = rf"[-+±]?\s?{_TERM}(?:\s*[-+*/^×÷·±]\s*(?:{_TERM}|[-+]?[ie](?![\w'’]))|{_FACTOR})*"
_ITEM = rf"[-+]?(?:\d++(?:\.\d++)?+|{_CALL}|{_NAME})(?:\s*[-+*/^]\s*(?:\d++|{_CALL}|{_NAME})|{_FACTOR})*+"  # noqa: E501
_TUPLE = rf"\\?[(\[{{]\s*{_ITEM}(?:\s*[,;]\s*{_ITEM})+\s*\\?[)\]}}]"
_EXPRESSION = re.compile(
    (
        rf"(?<![^\s=*$€£¥₹(~∈])(?:{_TUPLE}(?:\s*(?:∪|U|\\cup)\s*{_TUPLE})*|(?:\d+(?: "
        rf"\d+/\d+|(?::\d+)+)|{_SUM})!?({_UNIT})?)"
    ),
    re.ASCII,
)
"""A tuple, a set or an interval; or a number or an operation on numbers, with the word or sign
after it."""
_MATHEMATICS = re.compile(
    rf"(?!(?:an?|I)\s)(?=.*[\d\\^=<>≤≥π∞√½⅓⅔¼¾]|.*\b(?:{_NAMES})\b)"
    rf"(?:[^\w\n]|[\d_²³½⅓⅔¼¾π]|\\[A-Za-z]+|(?<![A-Za-z])(?:{_FUNCTIONS}|{_NAMES}|or|and|mod|[xyz]+|[A-Za-z])(?![A-Za-z]))+"
)
_INTRODUCTION = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|so|thus|hence|therefore|then|get|have|obtain|find)\b,?|:(?=\s))\s*",
    re.I,
)
_NAME_EQUALS = re.compile(r"(?:^|(?<=[,;])|\b(?:and|or)\b)\s*[A-Za-z](?:_\w|\([A-Za-z]\))?\s*=")
_EQUALS = re.compile(r"(?<![<>!])=")
_DELIMITER = re.compile(r"[?$]|\\[\[\]()]")
_INTRODUCED = re.compile(r"(?:\bare|^)[\s$*]*$")
_LISTED = re.compile(r"\s*(?:,\s*(?:(?:and|or)\s*)?|(?:and|or)\s*)")
_JOINED = re.compile(r"\s*(?:[,;]\s*)?(?:and|or|to|through)\s*|\s*[,;]\s*|[^\S\n]+")
_OR = re.compile(r"\s*(?:,\s*)?or\s*(?:[A-Za-z]\s*=\s*)?")
_LONGEST_FORMULA = 100
DENIED = "not "
"""How the answer begins that is not stated (`last_mathematics`)."""
_MOST_DENIED = 1000
_OPERATIONS = {
    "plus": "+",
    "over": "/",
    "minus": "-",
    "times": "*",
    "multiplied by": "*",
    "divided by": "/",
}
_OPERATION = re.compile(rf"(?<=\d)\s+({'|'.join(_OPERATIONS)})\s+(?=[\d.$])", re.I)
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s+\$?$", re.I)
_REASON = re.compile(
    r"\b(?:because|since|where|which(?! (?:is|was|are) (?:\w+ )?(?:wrong|incorrect|false))"
    r"|(?:for|when|if|with)(?=\s+\$?[A-Za-z]\s*=))\b"
)
_CONJUNCTIONS = ("and", "or", "to", "through")


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; a box that never closes is
    no answer."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def boxed_answer(text: str) -> str | None:
    r"""The last box, together with preceding ones that are separated only by "and", "or" or
    punctuation, as a list.

    Equal boxes count once; if one is empty, or the text denies all, the answer is ''.
    """
    boxes = _boxes(text)[-_MOST_DENIED:]
    if not boxes:
        return None

    while boxes and is_denied(text, boxes[-1][0], boxes[-1][1]):
        boxes.pop()
    if not boxes:
        return ""

    first = _first_joined(text, lambda i: boxes[i][:2], _BETWEEN_BOXES, len(boxes))
    contents = list(dict.fromkeys(content.strip() for _, _, content in boxes[first:]))
    return ", ".join(contents) if all(contents) else ""


def unboxed(text: str) -> str:
    r"""The text with each complete box replaced by its content, and without braces around the
    whole."""
    while boxes := _boxes(text):
        parts = []
        position = 0
        for start, end, content in boxes:
            parts += [text[position:start], content]
            position = end
        text = "".join([*parts, text[position:]])

    text = text.strip()
    while text.startswith("{") and _closing_braces(text).get(0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def after_hashes(text: str) -> str | None:
    """What follows the last `####` on its line, as GSM8K writes its answers."""
    before, mark, after = text.rpartition("####")
    return after.strip().split("\n")[0].strip() if mark else None


def marked_answer(text: str) -> str | None:
    """The answer that the text marks as such, by a box or by `####`; None if it marks none."""
    box = boxed_answer(text)
    return box if box is not None else after_hashes(text)


def bare_answer(text: str) -> str:
    """A data set's answer without its mark: the marked answer of a worked solution, else the whole
    text."""
    marked = marked_answer(text)
    return (text if marked is None else marked).strip()


def decoded(value: object) -> object:
    """The list or mapping of a column that holds JSON, as in some data sets; any other value
    unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def phrased_answer(text: str) -> tuple[str, str] | None:
    """What follows the last "answer is", "answer:" or `<answer>`, to the end of that sentence, line
    or tag; and the rest of the text.

    One that the text denies or doubts ("I do not think that the answer is") does not count."""
    found = list(_PHRASE.finditer(text))[-_MOST_DENIED:]
    while found and is_denied(text, found[-1].start()):
        found.pop()
    if not found:
        return None

    line, *_ = re.split(r"\n|(?i:</answer>)", text[found[-1].end() :], maxsplit=1)
    phrase = _SENTENCE_END.split(line)[0]
    rest = text[found[-1].end() + len(phrase) :]
    return phrase.strip(), rest


def without_markup(text: str) -> str:
    """The text without HTML tags and entities, emphasis in Markdown, and quotation marks around a
    word or value."""
    text = (
        _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
        .replace("“", '"')
        .replace("”", '"')
    )
    if names := {name.lower() for name in _CLOSED_TAG.findall(text)}:
        text = re.sub(rf"<(?:/\s*)?(?:{'|'.join(names)})\b[^<>]*>", "", text, flags=re.I)
    text = _STRUCK.sub("", _BREAK.sub(" ", text) if "<" in text else text)
    if not text.isascii():
        text = _SIGN.sub("", text)
    text = _SUPERSCRIPT.sub(r"^{\1}", text)
    while (plain := _EMPHASIS.sub(r"\2", text)) != text:
        text = plain
    return text


def is_mathematics(text: str) -> bool:
    """Whether a short text is a formula as a whole, even without delimiters: `[1, 3]`,
    `-1 + exp(16)`, `x < 2`."""
    return len(text) <= _LONGEST_FORMULA and _MATHEMATICS.fullmatch(text) is not None


def final_formula(text: str) -> str | None:
    """The formula without delimiters that ends the text after "is", "are", ":" or alone on its
    line: `2, 3 and 5`, `x = 2 or x = 3`, `x^2 + 1`. None for a number or an operation on numbers,
    and for a calculation with `=`."""
    line = text.rpartition("\n")[2][-2 * _LONGEST_FORMULA :]
    introductions = list(_INTRODUCTION.finditer(line))
    start = introductions[-1].end() if introductions else 0
    formula = line[start:].rstrip(" .")
    is_calculation = _EQUALS.search(_NAME_EQUALS.sub("", formula)) is not None
    if is_calculation or _DELIMITER.search(formula) or not is_mathematics(formula):
        return None

    is_stated = _EXPRESSION.fullmatch(formula) is None and not is_denied(line, start)

    return formula if is_stated else None


def last_mathematics(prose: str, is_answer: bool = False) -> tuple[str, str] | None:
    """The last formula between delimiters, or the last number; and the word or sign after the
    number.

    Neighbouring formulas that a comma, "and" or "or" joins are one answer, and so are numbers that
    an "or" joins; if the prose is the answer, also those that anything else joins. What the prose
    denies or doubts ("7 is wrong") is passed over, and in an answer also what it only compares with
    ("at least 7"); if there is nothing else, it is returned as "not 7".
    """
    if (
        is_answer
        and (reason := _REASON.search(prose))
        and (stated := last_mathematics(prose[: reason.start()], True))
    ):
        return stated

    prose = _OPERATION.sub(lambda word: f" {_OPERATIONS[word[1].lower()]} ", prose)
    formulas = list(_FORMULA.finditer(prose))
    numbers = list(_EXPRESSION.finditer(prose))
    stated_formulas = _last_stated(prose, formulas, _LISTED, is_answer)

    stated_numbers = _last_stated(prose, numbers, _JOINED if is_answer else _OR, is_answer)
    if stated_formulas and (
        not stated_numbers or stated_formulas[-1].end() > stated_numbers[-1].end()
    ):
        return ", ".join(next(filter(None, match.groups())) for match in stated_formulas), ""
    if not stated_numbers:
        denied = reversed(formulas + numbers)
        return next(((f"{DENIED}{each.group()}", "") for each in denied), None)

    bare = [
        ("-" if _NEGATIVE.search(clause_before(prose, each.start())) else "")
        + each.group().removesuffix(each[1] or "")
        for each in stated_numbers
    ]
    return ", ".join(bare), stated_numbers[-1][1] or ""


def _last_stated(
    prose: str, found: list[re.Match[str]], joint: re.Pattern[str], is_answer: bool
) -> list[re.Match[str]]:
    """The last of the formulas or numbers, with those that are joined to it, that no words before
    it deny."""

    def with_unit(index: int) -> tuple[int, int]:
        return found[index].start(), _end(found[index])

    def value(index: int) -> tuple[int, int]:
        return found[index].start(), _value_end(found[index])

    end = len(found)
    while end > max(0, len(found) - _MOST_DENIED):
        first = _first_joined(prose, with_unit, joint, end)
        if joint is _OR:
            listed = _first_joined(prose, value, _LISTED, end)
            if _INTRODUCED.search(clause_before(prose, found[listed].start())):
                first = listed

        if not is_denied(prose, found[first].start(), value(end - 1)[1], is_answer):
            return found[first:end]
        end = first

    return []


def _value_end(found: re.Match[str]) -> int:
    """End of the formula, or of the number without its unit."""
    is_bare = found.re is _FORMULA or found[1] is None
    return found.end() if is_bare else found.start(1)


def _end(found: re.Match[str]) -> int:
    """End of the formula, or of the number with its unit; "or" is not a unit."""
    is_joint = found.re is _EXPRESSION and (found[1] or "").strip() in _CONJUNCTIONS
    return _value_end(found) if is_joint else found.end()


def _first_joined(
    text: str, span: Callable[[int], tuple[int, int]], joint: re.Pattern[str], end: int
) -> int:
    """Index of the first of the spans that are joined to the one before the index `end`."""
    first = end - 1
    while first and joint.fullmatch(text, span(first - 1)[1], span(first)[0]):
        first -= 1
    return first


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the boxes that are complete and not in another."""
    found = list(_BOX.finditer(text))
    ends = _closing_braces(text) if found else {}

    boxes: list[tuple[int, int, str]] = []
    for match in found:
        if boxes and match.start() < boxes[-1][1]:
            continue

        if text.startswith("{", match.end()):
            if match.end() in ends:
                end = ends[match.end()]
                boxes.append((match.start(), end + 1, text[match.end() + 1 : end]))
        elif unbraced := _UNBRACED_BOX.match(text, match.end()):
            boxes.append((match.start(), unbraced.end(), unbraced.group()))

    return boxes


def _closing_braces(text: str) -> dict[int, int]:
    r"""Position of each opening brace → that of its closing one; `\{` and `\}` do not count."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.start()

    return ends
