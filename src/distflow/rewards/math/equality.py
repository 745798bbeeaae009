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
from distflow.rewards.math.text_and_units import (
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


def are_equal(gold: str, answer: str) -> bool:
    """Compare two normalised answers. One that is too costly to compare (`is_affordable`) equals
    only the same text."""
    if gold == answer or (
        " " in gold + answer and _SPACES.sub("", gold) == _SPACES.sub("", answer)
    ):
        return True
    if not gold or not answer or not is_affordable(answer) or not is_affordable(gold):
        return False
    return next(
        (reward_result for rule in _RULES if (reward_result := rule(gold, answer)) is not None),
        False,
    )


def _numbers(gold: str, answer: str) -> bool | None:
    gold_number = plain_number(gold)
    number = plain_number(answer)
    return None if gold_number is None or number is None else numbers_equal(gold_number, number)


def _choices(gold: str, answer: str) -> bool | None:
    """`(C)` equals `C. x = 42`: the letter decides, unless another choice is named."""
    found = [_CHOICE.fullmatch(unwrap(text)) for text in (gold, answer)]
    letters = [
        match[1].casefold() if match else words(text)
        for match, text in zip(found, (gold, answer), strict=True)
    ]
    if found == [None, None] or not all(letter and len(letter) == 1 for letter in letters):
        return None
    if any(match and _OTHER_CHOICE.search(match[2]) for match in found):
        return False
    return letters[0] == letters[1] and (None in found or None)


def _named_tuples(gold: str, answer: str) -> bool | None:
    """`(x,y) = (1,2)` equals `(1,2)`, but not `(y,x) = (1,2)`."""
    found = [_NAMED_TUPLE.fullmatch(text) for text in (gold, answer)]
    if found == [None, None]:
        return None
    if len({match[1].replace(" ", "") for match in found if match}) > 1:
        return False
    return are_equal(
        *(match[2] if match else text for match, text in zip(found, (gold, answer), strict=True))
    )


def _bases(gold: str, answer: str) -> bool | None:
    """`4210_5` equals `4210` and the same value in another base."""
    first = _BASED.fullmatch(gold)
    second = _BASED.fullmatch(answer)
    if first and second:
        return first.groups() == second.groups() or (
            (value := _value(first)) is not None and value == _value(second)
        )
    if second and _value(second) is None:  # `18_8` is no number
        return False
    if first or second:
        return (first[1] if first else gold) == (second[1] if second else answer)
    return None


def _value(based: re.Match[str]) -> int | None:
    name = based[2] or based[3]
    base = int(name) if name.isdecimal() and len(name) < 3 else _BASES.get(name.lower(), 0)
    try:
        return int(based[1], base) if 2 <= base <= 36 else None
    except ValueError:  # a digit that the base does not have
        return None


def _clock_times(gold: str, answer: str) -> bool | None:
    """The same hour and minute; a.m. and p.m. count if both have them. `9:16` may also be a
    ratio."""
    first = _CLOCK.fullmatch(gold)
    second = _CLOCK.fullmatch(answer)
    if first is None or second is None:
        return None
    times = [[int(part or 0) for part in match.groups()[:3]] for match in (first, second)]
    halves = {match[4].lower() for match in (first, second) if match[4]}
    return times[0] == times[1] and len(halves) < 2


def _ratios(gold: str, answer: str) -> bool | None:
    """`1:2` equals `2:4` and 1/2. A ratio equals a number only in lowest terms: others may be
    divisions or times."""
    sides = [split_top(text.replace(r"\colon", ":"), ":") for text in (gold, answer)]
    if max(map(len, sides)) == 1:
        return None
    if len(sides[0]) == len(sides[1]):
        return all(
            are_equal(
                *(rf"\frac{{{part}}}{{{side[0]}}}" for side, part in zip(sides, parts, strict=True))
            )
            for parts in zip(sides[0][1:], sides[1][1:], strict=True)
        )
    ratio = max(sides, key=len)
    if len(ratio) > 2 or (all(map(str.isdecimal, ratio)) and math.gcd(*map(int, ratio)) > 1):
        return False
    first, second = (
        side[0] if len(side) == 1 else rf"\frac{{{side[0]}}}{{{side[1]}}}" for side in sides
    )
    return are_equal(first, second)


def _congruences(gold: str, answer: str) -> bool | None:
    r"""`2 \pmod 5` equals 2 and `7 \pmod 5`; 2 does not equal `7 \mod 5`."""
    found = [_MODULUS.fullmatch(text) for text in (gold, answer)]
    moduli = {match[2] for match in found if match}
    if len(moduli) != 1:
        return False if moduli else None
    modulus = next(iter(moduli))
    if (
        found[0] is None
        and found[1]
        and _residue(residue := _CONGRUENT.sub("", found[1][1]), modulus) != residue
    ):
        return False  # the residue is not computed
    first, second = (
        _residue(_CONGRUENT.sub("", match[1]), modulus) if match else text
        for match, text in zip(found, (gold, answer), strict=True)
    )
    return are_equal(first, second)


def _residue(value: str, modulus: str) -> str:
    """The residue of an integer; any other value unchanged."""
    is_known = modulus.isdecimal() and int(modulus) > 0 and re.fullmatch(r"-?\d+", value)
    return str(int(value) % int(modulus)) if is_known else value


def _equations(gold: str, answer: str) -> bool | None:
    """The right side alone is no answer to `x + y = 3`; to `y = 3 - x` it is."""
    sides = [split_top(text, "=") for text in (gold, answer)]
    return False if len(sides[0]) == 2 and len(sides[1]) == 1 and _SUM.search(sides[0][0]) else None


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
            return False if _NAMED.match(gold) and is_number(gold_sides[-1]) else None
        gold = gold_sides[-1]
    sides = [
        side for i, side in enumerate(sides) if not (_is_name(side) and (i == 0 or is_number(gold)))
    ]
    if not sides and rough:
        sides = [rough.pop(0)]
    bare = split_unit(gold)[0]
    return (
        any(are_equal(gold, side) for side in sides)
        and all(
            are_equal(gold, side) or expressions_equal(bare, split_unit(side)[0]) for side in sides
        )
        and all(is_approximation(bare, split_unit(side)[0]) for side in rough)
    )


def _is_name(side: str) -> bool:
    """Whether it has only variables, like `x`, `a^2 + b` and `f(3)`."""
    rest = _CALL.sub("x", side)
    return bool(_LETTER.search(rest)) and not _NO_NAME.search(rest)


def _measures(gold: str, answer: str) -> bool | None:
    """The same number with a unit or without; two units are converted; 50 % is 50 and 0.5; 180° is
    180 and π."""
    gold_value, gold_unit = split_unit(gold)
    value, unit = split_unit(
        answer, is_measured=gold_unit is not None or plain_number(gold) is not None
    )
    is_stated = has_form_of(gold_value, value) or has_form_of(r"\pi", value)
    if gold_unit is not None and unit is not None:
        factor = conversion(gold_unit, unit)
        return factor is not None and is_stated and _equal_scaled(gold_value, value, factor)
    if gold_unit is None and unit is None:
        return None
    number = plain_number(gold)
    if gold_unit is None and unit is not None and not (unit.is_plain or _ONE.fullmatch(value)):
        return False
    is_small = number is not None and 0 < abs(number) < 1
    # 12 dozen, 0.5 %
    is_scaled = unit is not None and not unit.dimensions and (unit.size > 1 or is_small)
    if not is_scaled and are_equal(gold_value, value):
        return True
    measured, bare, its_unit = (
        (gold_value, value, gold_unit) if gold_unit else (value, gold_value, unit)
    )
    factor = conversion(RADIAN if r"\pi" in bare else NUMBER, its_unit) if its_unit else None
    return factor is not None and is_stated and _equal_scaled(bare, measured, factor)


def _equal_scaled(value: str, measured: str, factor: str) -> bool:
    if factor == UNCHANGED:
        return are_equal(value, measured)
    return is_affordable(measured) and expressions_equal(value, rf"{factor} \cdot ({measured})")


def _relations(gold: str, answer: str) -> bool | None:
    r"""`x < 2` equals `(-\infty, 2)`; `x \in S` equals S."""
    sides = [_REAL.sub("", _BUILDER.sub(r"\1", text)) for text in (gold, answer)]
    sides = [_ALL_REALS.sub(r"(-\\infty,\\infty)", _MEMBER.sub("", side)) for side in sides]
    related = [_RELATION.search(side) is not None for side in sides]
    if related[0] != related[1]:
        first, second = (
            _as_intervals(side) if found else side
            for side, found in zip(sides, related, strict=True)
        )
        return None if first is None or second is None else are_equal(first, second)
    return are_equal(*sides) if sides != [gold, answer] else None


def _as_intervals(relations: str) -> str | None:
    r"""`x < 1 \text{ or } x \ge 3` as `(-\infty,1) \cup [3,\infty)`; None if they are not intervals
    of a variable."""
    intervals = [_as_interval(_RELATION.split(part)) for part in _OR.split(relations)]
    known = [interval for interval in intervals if interval is not None]
    return r" \cup ".join(known) if len(known) == len(intervals) else None


def _as_interval(chain: list[str]) -> str | None:
    """A chain (sides and the signs between them) as an interval."""
    chain = [part.strip() for part in chain]
    if len(chain) == 3 and not _VARIABLE.fullmatch(chain[0]):
        chain = [chain[2], _MIRRORED[chain[1]], chain[0]]
    if len(chain) == 3 and chain[1] == r"\neq":
        return (
            rf"(-\infty,{chain[2]}) \cup ({chain[2]},\infty)"
            if _VARIABLE.fullmatch(chain[0])
            else None
        )
    if len(chain) == 3:
        is_upper = chain[1] in ("<", r"\le")
        chain = [r"-\infty", "<", *chain] if is_upper else [r"\infty", ">", *chain]
    if len(chain) != 5 or not _VARIABLE.fullmatch(chain[2]):
        return None
    if chain[1] in (">", r"\ge"):
        chain = [_MIRRORED.get(part, part) for part in reversed(chain)]
    if not {chain[1], chain[3]} <= {"<", r"\le"}:
        return None
    return (
        f"{'(' if chain[1] == '<' else '['}{chain[0]},{chain[4]}{')' if chain[3] == '<' else ']'}"
    )


def _alternatives(gold: str, answer: str) -> bool | None:
    """`1/2 or 0.5` equals 1/2: one value in several forms."""
    forms = _ALTERNATIVE.split(answer)
    is_one_value = len(forms) > 1 and all(are_equal(gold, form) for form in forms)
    return True if is_one_value else None


def _lists(gold: str, answer: str) -> bool | None:
    r"""Item by item: in order between ( ) and [ ], in any order between \{ \} and without
    brackets."""
    (brackets, items), (other_brackets, others) = _items(gold), _items(answer)
    if (not brackets and not other_brackets and len(items) == len(others) == 1) or "" in (
        *items,
        *others,
    ):
        return None
    if not (brackets and other_brackets) and 1 == min(len(items), len(others)) < max(
        len(items), len(others)
    ):
        if words(gold) is not None and words(answer) is not None:
            return words(gold) == words(answer)
        return None if _SET_OPERATION.search(gold + answer) else False
    if len(items) != len(others) or not _brackets_agree(
        brackets, other_brackets, is_pair=len(items) == 2
    ):
        return False
    if {brackets, other_brackets} <= {"", r"\{\}"} and _names_several(items) == _names_several(
        others
    ):
        return _same_items(items, others)
    if r"\{\}" in (brackets, other_brackets):
        return False
    return all(are_equal(*pair) for pair in zip(items, others, strict=True))


def _names_several(items: list[str]) -> bool:
    """Whether they are like `x = 5, y = 3`, so that values without names must be in the same
    order."""
    return len({match[1] for item in items if (match := _NAMED.match(item))}) > 1


def _items(text: str) -> tuple[str, list[str]]:
    r"""Brackets, or '', and the items in them; `\pm` makes two items, and a text that is not a list
    is one item."""
    opening, closing, items = (plain_number(text) is None and listed(text)) or ("", "", [text])
    brackets = (opening + closing).replace(r"\langle", "(").replace(r"\rangle", ")")
    if brackets in ("", r"\{\}"):
        items = [
            item.replace(r"\pm", sign)
            for item in items
            for sign in ("+-" if r"\pm" in item else "+")
        ]
    return brackets, items


def _brackets_agree(gold: str, answer: str, is_pair: bool) -> bool:
    """`(2,5)` may be written `2,5`; around three or more items () and [] are equivalent, around two
    maybe an interval."""
    if gold == answer:
        return True
    if r"\{\}" in (gold, answer):
        return "" in (gold, answer)
    return {gold, answer} <= ({"()", ""} if is_pair else {"()", "[]", ""})


def _same_items(items: list[str], others: list[str]) -> bool:
    """Whether the items can be paired with equal ones of the other list."""
    left = list(others)
    for item in sorted(items, key=lambda item: item not in others):
        partner = (
            item
            if item in left
            else next((other for other in left if are_equal(item, other)), None)
        )
        if partner is None:
            return False
        left.remove(partner)
    return True


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
