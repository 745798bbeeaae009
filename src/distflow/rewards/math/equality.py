"""Are two answers mathematically equal? Each rule is for one notation; the first that applies
decides.

If none applies, both are parsed and compared by math-verify, which alone ignores units and bases,
reads `6:30` as a division and words as products of their letters, and rounds at the sixth decimal,
so that 1e-7 equals 2e-7.
"""

import math
import re
from collections.abc import Callable

from distflow.rewards.math.formula_equality import (
    expressions_equal,
    has_form_of,
    is_affordable,
    is_approximation,
    is_number,
    numbers_equal,
    plain_number,
)
from distflow.rewards.math.notation import (
    NUMBER,
    RADIAN,
    UNCHANGED,
    conversion,
    is_prose,
    listed,
    split_top,
    split_unit,
    unwrap,
    words,
)

_SPACES = re.compile(r" (?![A-Za-z0-9.\\])|(?<![A-Za-z0-9.]) ")
_CHOICE = re.compile(r"\(?\s*([A-J])\s*(?:\)\s*[.:]?|[.:])\s*(?:\\ )?\s*(.*)", re.DOTALL)
_OTHER_CHOICE = re.compile(
    r"(?<![A-Za-z\\])[A-J]\s*(?:[).:,;/&|]|$)|\b(?:and|or)\s+\(?[A-J](?![A-Za-z])"
)
_NAMED = re.compile(r"([A-Za-z])\s*=")
_CALL = re.compile(r"[A-Za-z]'*(?:\^\{-1\})?\([^()]*\)|_(?:\{[^{}]*\}|\w)|\^(?:\d|\{\d\})")
_LETTER = re.compile(r"[A-Za-z]")
_SUM = re.compile(r"[\w)}]\s*[-+]")
_NO_NAME = re.compile(r"\d|\\(?:pi|infty)(?![A-Za-z])")
_NAMED_TUPLE = re.compile(r"(\([A-Za-z](?:, ?[A-Za-z])+\)) ?= ?(\(.+)")
_REAL = re.compile(
    r"^[A-Za-z]\s*\\in\s*\\mathbb\{R\}\s*,\s*(?=[A-Za-z]\s*(?:<|>|\\le |\\ge |\\neq ))"
)
_BASED = re.compile(
    r"\(?((?=[A-F]*\d)[0-9A-F]+)\)?"
    r"(?:_\s*\{?(?:\\text\{)?\s*\(?(\w+)\)?\s*\}{0,2}"  # 4210_5
    r"|\s*(?:\\text\{)?\s*\(?(?:in )?base[ -](\w+)\)?\s*\}?)"  # 4210 (base 5)
)
_BASE_NAMES = (
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
_BASES = {name: base for base, name in enumerate(_BASE_NAMES, start=2)} | {"sixteen": 16}
_ONE = re.compile(r"1|\\frac\{?1\}?\{?\d\}?|1/\d")
_CLOCK = re.compile(
    r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:\\text\{)?\s*([ap])?\.?\s*(?:m\.?)?\s*\}?",
    re.IGNORECASE,
)
_MODULUS = re.compile(
    r"(.+?)\s*\(?\s*(?:\\[pb]?mod|\\text\{\s*\(?mod(?:ulo)?\s*\}|\bmod(?:ulo)?\b)\s*\{?\s*(\w+)\s*\}?\s*\)?"
)
_CONGRUENT = re.compile(r".*\\equiv\s*")
_MEMBER = re.compile(r"[A-Za-z]\s*\\in\s+(?![-+\d])")
_RELATION = re.compile(r"\s*(<|>|\\le |\\ge |\\neq )\s*")
_VARIABLE = re.compile(r"[A-Za-z]|\\(?!pi|infty)[a-z]+")
_BUILDER = re.compile(
    r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\vert|\||:)\s*(.+)\\\}"
)
_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus|begin|mathbb)(?![A-Za-z])")
_OR = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\(?:lor|vee|cup)(?![A-Za-z]))\s*")
_ALTERNATIVE = re.compile(r",?\s*(?:\\text\s*\{\s*or\s*\}|\bor\b)\s*")
_ALL_REALS = re.compile(
    r"(?:\\text\s*\{\s*)?all real (?:numbers|values)(?: of [a-z])?\s*\}?|\\math(?:bb|bf)\{R\}|\\R"
)
_MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\neq": r"\neq"}

_OPENING = {"<": "(", r"\le": "["}
_UNORDERED = ("", r"\{\}")
"""Brackets within which the order does not count."""
_CLOSING = {"<": ")", r"\le": "]"}


def are_equal(gold: str, answer: str) -> bool:
    """Compare two normalised answers. One that is too costly to compare (`is_affordable`) equals
    only the same text."""
    if gold == answer:
        return True

    has_spaces = " " in gold or " " in answer
    if has_spaces and _SPACES.sub("", gold) == _SPACES.sub("", answer):
        return True
    if not gold or not answer or not is_affordable(answer) or not is_affordable(gold):
        return False

    for rule in _RULES:
        result = rule(gold, answer)
        if result is not None:
            return result

    return False


def _numbers(gold: str, answer: str) -> bool | None:
    gold_number = plain_number(gold)
    number = plain_number(answer)
    if gold_number is None or number is None:
        return None
    return numbers_equal(gold_number, number)


def _choices(gold: str, answer: str) -> bool | None:
    """`(C)` equals `C. x = 42`: the letter decides, unless another choice is named."""
    gold_choice = _CHOICE.fullmatch(unwrap(gold))
    choice = _CHOICE.fullmatch(unwrap(answer))
    if gold_choice is None and choice is None:
        return None

    gold_letter = _letter(gold_choice, gold)
    letter = _letter(choice, answer)
    if gold_letter is None or letter is None:
        return None

    for match in (gold_choice, choice):
        if match is not None and _OTHER_CHOICE.search(match[2]):
            return False

    if gold_letter != letter:
        return False

    # Of two texts that name the same letter, the rest decides.
    have_texts = gold_choice is not None and choice is not None
    return None if have_texts else True


def _letter(choice: re.Match[str] | None, text: str) -> str | None:
    """The letter of a choice, or of a text that is only a letter; None if there is none."""
    letter = words(text) if choice is None else choice[1].casefold()
    if letter is None or len(letter) != 1:
        return None
    return letter


def _named_tuples(gold: str, answer: str) -> bool | None:
    """`(x,y) = (1,2)` equals `(1,2)`, but not `(y,x) = (1,2)`."""
    gold_match = _NAMED_TUPLE.fullmatch(gold)
    match = _NAMED_TUPLE.fullmatch(answer)

    if gold_match is None:
        if match is None:
            return None
        return are_equal(gold, match[2])
    if match is None:
        return are_equal(gold_match[2], answer)

    have_same_names = gold_match[1].replace(" ", "") == match[1].replace(" ", "")

    return have_same_names and are_equal(gold_match[2], match[2])


def _bases(gold: str, answer: str) -> bool | None:
    """`4210_5` equals `4210` and the same value in another base."""
    first = _BASED.fullmatch(gold)
    second = _BASED.fullmatch(answer)
    if first and second:
        value = _value(first)
        is_same_value = value is not None and value == _value(second)
        return is_same_value or first.groups() == second.groups()

    if second:
        if _value(second) is None:  # `18_8` is no number
            return False
        return gold == second[1]
    if first:
        return first[1] == answer

    return None


def _value(based: re.Match[str]) -> int | None:
    name = based[2] or based[3]
    if name.isdecimal() and len(name) < 3:
        base = int(name)
    else:
        base = _BASES.get(name.lower(), 0)

    if not 2 <= base <= 36:
        return None

    try:
        return int(based[1], base)
    except ValueError:  # a digit that the base does not have
        return None


def _clock_times(gold: str, answer: str) -> bool | None:
    """The same hour and minute; a.m. and p.m. count if both have them. `9:16` may also be a
    ratio."""
    first = _CLOCK.fullmatch(gold)
    second = _CLOCK.fullmatch(answer)
    if first is None or second is None:
        return None
    if first[4] and second[4] and first[4].lower() != second[4].lower():
        return False
    return _clock_parts(first) == _clock_parts(second)


def _clock_parts(match: re.Match[str]) -> list[int]:
    """Hours, minutes and seconds."""
    return [int(part or 0) for part in match.groups()[:3]]


def _ratios(gold: str, answer: str) -> bool | None:
    """`1:2` equals `2:4` and 1/2. A ratio equals a number only in lowest terms: others may be
    divisions or times."""
    first = split_top(gold.replace(r"\colon", ":"), ":")
    second = split_top(answer.replace(r"\colon", ":"), ":")
    if len(first) == 1 and len(second) == 1:
        return None
    if len(first) == len(second):
        for part, other in zip(first[1:], second[1:], strict=True):
            if not are_equal(_quotient(part, first[0]), _quotient(other, second[0])):
                return False
        return True

    ratio = max(first, second, key=len)
    if len(ratio) > 2:
        return False
    if all(part.isdecimal() for part in ratio) and math.gcd(*map(int, ratio)) > 1:
        return False

    return are_equal(_number_of_ratio(first), _number_of_ratio(second))


def _quotient(numerator: str, denominator: str) -> str:
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _number_of_ratio(parts: list[str]) -> str:
    """parts: one or two."""
    if len(parts) == 1:
        return parts[0]
    return _quotient(parts[0], parts[1])


def _congruences(gold: str, answer: str) -> bool | None:
    r"""`2 \pmod 5` equals 2 and `7 \pmod 5`; 2 does not equal `7 \mod 5`."""
    gold_match = _MODULUS.fullmatch(gold)
    match = _MODULUS.fullmatch(answer)
    if gold_match is None and match is None:
        return None
    if gold_match is not None and match is not None and gold_match[2] != match[2]:
        return False

    if gold_match is not None:
        gold = _residue(_CONGRUENT.sub("", gold_match[1]), gold_match[2])

    if match is not None:
        given = _CONGRUENT.sub("", match[1])
        answer = _residue(given, match[2])
        if gold_match is None and answer != given:
            return False  # the residue is not computed

    return are_equal(gold, answer)


def _residue(value: str, modulus: str) -> str:
    """The residue of an integer; any other value unchanged."""
    if not modulus.isdecimal() or int(modulus) == 0 or not re.fullmatch(r"-?\d+", value):
        return value
    return str(int(value) % int(modulus))


def _equations(gold: str, answer: str) -> bool | None:
    """The right side alone is no answer to `x + y = 3`; to `y = 3 - x` it is."""
    sides = split_top(gold, "=")
    is_alone = len(split_top(answer, "=")) == 1
    if len(sides) == 2 and is_alone and _SUM.search(sides[0]):
        return False
    return None


def _chains(gold: str, answer: str) -> bool | None:
    r"""`x = 3 + 4 = 7` equals 7: every side does, and one states it; roundings follow `\approx`."""
    exact, *rough = split_top(re.sub(r"\\approx(?![A-Za-z])", "≈", answer), "≈")
    sides = split_top(exact, "=")
    if (len(sides) == 1 and not rough) or listed(answer):
        return None

    gold_sides = split_top(gold, "=")
    if len(gold_sides) > 1:
        if gold_sides[0] not in sides or not _is_name(gold_sides[0]):
            # else an equation
            is_value = _NAMED.match(gold) and is_number(gold_sides[-1])
            return False if is_value else None
        gold = gold_sides[-1]

    values = list[str]()
    for number, side in enumerate(sides):
        may_be_name = number == 0 or is_number(gold)
        if not (may_be_name and _is_name(side)):
            values.append(side)

    if not values and rough:
        values = [rough.pop(0)]
    bare = split_unit(gold)[0]

    is_stated = False
    for value in values:
        if are_equal(gold, value):
            is_stated = True
        elif not expressions_equal(bare, split_unit(value)[0]):
            return False

    return is_stated and all(is_approximation(bare, split_unit(side)[0]) for side in rough)


def _is_name(side: str) -> bool:
    """Whether it has only variables, like `x`, `a^2 + b` and `f(3)`."""
    rest = _CALL.sub("x", side)
    return bool(_LETTER.search(rest)) and not _NO_NAME.search(rest)


def _measures(gold: str, answer: str) -> bool | None:
    """The same number with a unit or without; two units are converted; 50 % is 50 and 0.5; 180° is
    180 and π."""
    number = plain_number(gold)
    gold_value, gold_unit = split_unit(gold)
    is_measured = gold_unit is not None or number is not None
    value, unit = split_unit(answer, is_measured=is_measured)
    is_stated = has_form_of(gold_value, value) or has_form_of(r"\pi", value)
    if gold_unit is not None and unit is not None:
        factor = conversion(gold_unit, unit)
        return factor is not None and is_stated and _equal_scaled(gold_value, value, factor)

    if unit is not None:
        if not unit.is_plain and not _ONE.fullmatch(value):
            return False

        is_small = number is not None and 0 < abs(number) < 1
        is_scaled = not unit.dimensions and (unit.size > 1 or is_small)  # 12 dozen, 0.5 %
        its_unit = unit
        measured = value
        bare = gold_value
    elif gold_unit is not None:
        is_scaled = False
        its_unit = gold_unit
        measured = gold_value
        bare = value
    else:
        return None

    if not is_scaled and are_equal(gold_value, value):
        return True
    factor = conversion(RADIAN if r"\pi" in bare else NUMBER, its_unit)
    return factor is not None and is_stated and _equal_scaled(bare, measured, factor)


def _equal_scaled(value: str, measured: str, factor: str) -> bool:
    if factor == UNCHANGED:
        return are_equal(value, measured)
    return is_affordable(measured) and expressions_equal(value, rf"{factor} \cdot ({measured})")


def _relations(gold: str, answer: str) -> bool | None:
    r"""`x < 2` equals `(-\infty, 2)`; `x \in S` equals S."""
    first: str | None = _without_set(gold)
    second: str | None = _without_set(answer)
    assert first is not None and second is not None
    has_relation = _RELATION.search(first) is not None
    if has_relation == (_RELATION.search(second) is not None):
        is_changed = (first, second) != (gold, answer)
        return are_equal(first, second) if is_changed else None

    if has_relation:
        first = _as_intervals(first)
    else:
        second = _as_intervals(second)

    if first is None or second is None:
        return None
    return are_equal(first, second)


def _without_set(text: str) -> str:
    r"""`\{x \mid x < 2\}` as `x < 2`, `x \in S` as S, and all reals as an interval."""
    text = _BUILDER.sub(r"\1", text)
    text = _REAL.sub("", text)
    text = _MEMBER.sub("", text)
    return _ALL_REALS.sub(r"(-\\infty,\\infty)", text)


def _as_intervals(relations: str) -> str | None:
    r"""`x < 1 \text{ or } x \ge 3` as `(-\infty,1) \cup [3,\infty)`; None if they are not intervals
    of a variable."""
    intervals = list[str]()
    for part in _OR.split(relations):
        interval = _as_interval(_RELATION.split(part))
        if interval is None:
            return None
        intervals.append(interval)

    return r" \cup ".join(intervals)


def _as_interval(chain: list[str]) -> str | None:
    """A chain (sides and the signs between them) as an interval."""
    chain = [part.strip() for part in chain]
    if len(chain) == 3:
        if not _VARIABLE.fullmatch(chain[0]):
            chain = [chain[2], _MIRRORED[chain[1]], chain[0]]

        variable, sign, bound = chain
        if sign == r"\neq":
            if not _VARIABLE.fullmatch(variable):
                return None
            return rf"(-\infty,{bound}) \cup ({bound},\infty)"

        if sign in ("<", r"\le"):
            chain = [r"-\infty", "<", *chain]
        else:
            chain = [r"\infty", ">", *chain]

    if len(chain) != 5 or not _VARIABLE.fullmatch(chain[2]):
        return None

    if chain[1] in (">", r"\ge"):
        chain = [_MIRRORED.get(part, part) for part in reversed(chain)]
    least, first_sign, _, second_sign, most = chain
    if first_sign not in _OPENING or second_sign not in _CLOSING:
        return None

    return f"{_OPENING[first_sign]}{least},{most}{_CLOSING[second_sign]}"


def _alternatives(gold: str, answer: str) -> bool | None:
    """`1/2 or 0.5` equals 1/2: one value in several forms."""
    forms = _ALTERNATIVE.split(answer)
    if len(forms) > 1 and all(are_equal(gold, form) for form in forms):
        return True
    return None


def _lists(gold: str, answer: str) -> bool | None:
    r"""Item by item: in order between ( ) and [ ], in any order between \{ \} and without
    brackets."""
    brackets, items = _items(gold)
    other_brackets, others = _items(answer)
    num_items = len(items)
    num_others = len(others)
    if "" in items or "" in others:
        return None

    has_both_brackets = bool(brackets) and bool(other_brackets)
    if not brackets and not other_brackets and num_items == num_others == 1:
        return None

    if not has_both_brackets and num_items != num_others and 1 in (num_items, num_others):
        gold_words = words(gold)
        other_words = words(answer)
        if gold_words is not None and other_words is not None:
            return gold_words == other_words
        if _SET_OPERATION.search(gold + answer):
            return None
        return False

    if num_items != num_others:
        return False
    if not _brackets_agree(brackets, other_brackets, is_pair=num_items == 2):
        return False

    are_unordered = brackets in _UNORDERED and other_brackets in _UNORDERED
    if are_unordered and _names_several(items) == _names_several(others):
        return _same_items(items, others)
    if r"\{\}" in (brackets, other_brackets):
        return False

    return all(are_equal(item, other) for item, other in zip(items, others, strict=True))


def _names_several(items: list[str]) -> bool:
    """Whether they are like `x = 5, y = 3`, so that values without names must be in the same
    order."""
    names = set[str]()
    for item in items:
        match = _NAMED.match(item)
        if match is not None:
            names.add(match[1])
    return len(names) > 1


def _items(text: str) -> tuple[str, list[str]]:
    r"""Brackets, or '', and the items in them; `\pm` makes two items, and a text that is not a list
    is one item."""
    opening = ""
    closing = ""
    items = [text]
    if plain_number(text) is None:
        opening, closing, items = listed(text) or ("", "", [text])
    brackets = (opening + closing).replace(r"\langle", "(").replace(r"\rangle", ")")
    if brackets not in _UNORDERED:
        return brackets, items

    signed = list[str]()
    for item in items:
        if r"\pm" in item:
            signed.append(item.replace(r"\pm", "+"))
            signed.append(item.replace(r"\pm", "-"))
        else:
            signed.append(item)

    return brackets, signed


def _brackets_agree(gold: str, answer: str, is_pair: bool) -> bool:
    """`(2,5)` may be written `2,5`; around three or more items () and [] are equivalent, around two
    maybe an interval."""
    if gold == answer:
        return True
    if r"\{\}" in (gold, answer):
        return "" in (gold, answer)
    alike = ("()", "") if is_pair else ("()", "[]", "")
    return gold in alike and answer in alike


def _same_items(items: list[str], others: list[str]) -> bool:
    """Whether the items can be paired with equal ones of the other list."""
    left = list(others)

    # First those that are there as the same text, so that no other item takes these.
    for item in sorted(items, key=lambda item: item not in others):
        partner = item if item in left else _first_equal(item, left)
        if partner is None:
            return False
        left.remove(partner)

    return True


def _first_equal(item: str, others: list[str]) -> str | None:
    return next((other for other in others if are_equal(item, other)), None)


def _texts(gold: str, answer: str) -> bool | None:
    """Words are compared letter by letter: math-verify reads them as products, so that `silent`
    equals `listen`."""
    first = words(gold)
    second = words(answer)
    if first is None or second is None or not (is_prose(gold) or is_prose(answer)):
        return None
    return first == second


_RULES: tuple[Callable[[str, str], bool | None], ...] = (
    _numbers,
    _alternatives,
    _choices,
    _named_tuples,
    _bases,
    _clock_times,
    _congruences,
    _equations,
    _chains,
    _measures,
    _ratios,
    _relations,
    _lists,
    _texts,
    lambda gold, answer: has_form_of(gold, answer) and expressions_equal(gold, answer),
)
