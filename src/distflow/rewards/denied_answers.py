"""Does the text around a value deny or doubt that it is the answer, or only compare with it?"""

import re

_DENIAL = (
    r"(?:\b(?:not|cannot|never)|n['’]t|\bneither|\bnor|\binstead of|\brather "
    r"than|\b(?:any|no)thing but|\bother than"
    r"|\bno longer|\bunlikely to|\bnowhere near|!=|≠)"
    r"(?:\s+(?:be|equal to|exactly|just|really|simply))*"
)
_COMPARISON = (
    r"\b(?:(?:less|more|fewer|greater|larger|smaller|higher|lower) than|at (?:least|most)|up "
    r"to|over|under|above|below"
    r"|between|from|twice|double|triple|half(?: "
    r"of)?|(?:root|third|quarter|square|cube|opposite|negative|inverse"
    r"|reciprocal) of"
    r"|(?:close|next) to|near(?:ly)?|almost|hardly|barely|within \S+ of|except(?: for)?|everything "
    r"but|off by)"
)
_MORE = r"(?:less|more|fewer|greater|larger|smaller|higher|lower|older|younger|longer|shorter|bigger|taller)"  # noqa: E501
_IS = r"(?:is|was|are|were|be|would be|['’]s)"
_THAN = rf"\s+(?:[a-z]+\s+){{0,2}}{_MORE}\s+(?:[a-z]+\s+)?than\s+(?:[a-z]+\s+){{0,2}}\$?"
_NEGATION = r"(?:\bnot|n['’]t|\bnever|\bcannot|\bno ?(?:body|one)|\bhardly)"
_DOUBT = (
    rf"(?:{_NEGATION}\s+(?:\S+\s+){{0,3}}?"
    r"(?:think|believe|suppose|guess|sa(?:y|id)|claim|mean|agree|sure|certain|convinced|confident)s?\b"
    r"|(?<!no )(?<!any )(?<!a )\bdoubt(?:ful)?\b|\b(?:den(?:y|ies)|disagree|disbelieve|no way)\b"
    r"|\b(?:un(?:sure|certain|true|likely)|false|wrong|incorrect|im(?:probable|possible)|refuse"
    r"|not (?:\w+ )?(?:true|correct|right|likely|possible|the case))\s+"
    r"(?:that|if|whether|for|the (?:final )?answer|(?:to|if (?:you|we|I)) "
    r"(?:say|think|claim|believe|conclude|assume))\b"
    r"|\b(?:wrong|incorrect|false)(?=\s*$|\s+(?:final )?(?:answer|value|result)))"
)
_NO_BREAK = r"(?:(?!\b(?:but|so|hence|thus|therefore|then|however|though|although|because|since|still|yet)\b)[^!])"  # noqa: E501
_SUPPOSED = (
    r"\b(?:if|whether|suppose|assume|assuming|not(?=\s+(?:the|my|our)\b))"
    r"(?:\s+that)?(?:\s+(?:the|my|our))?(?:\s+final)?"
    r"(?:\s+answer\s+is)?\s*$"
)
_DENIED_BEFORE = (
    rf"(?:{_DENIAL})[\s$*]*$|{_DOUBT}{_NO_BREAK}*$|{_SUPPOSED}|\d{_THAN}$"
    rf"|\bwhich\s+{_IS}\s+(?:[a-z]+\s+)?{_MORE}\s+than[\s$*]*$"
)
_DENIED, _NOT_STATED = (
    re.compile(rf"{_DENIED_BEFORE}{other}", re.I) for other in ("", rf"|(?:{_COMPARISON})[\s$*]*$")
)
_DENIED_BY_COLON = re.compile(rf"(?:{_DENIAL})\s*:[\s$*]*$", re.I)
_DENIED_AFTER = re.compile(
    rf"[\s$*)]*(?:{_THAN}(?:-?\d|(?-i:[b-z])\b)|\?|\((?:wrong|incorrect|false|not?\b(?!\s+\$?-?\d))"
    r"|(?:,?\s*(?:which|but\s+(?:that|this|it))\s*)?"
    rf"(?:(?:(?:{_IS}|can|could|does|must|should|may)\s*not\b|\w+n['’]t\b)(?:\s*(?:[.,;!?]|$)"
    r"|(?:\s+(?:be|the|an?|my|our|your|final))*\s+(?:right|correct|true|valid|possible|it|answer|solution|result)\b)"
    rf"|{_IS}\s+(?:\w+\s+)?(?:wrong|incorrect|false|untrue|impossible|too \w+)))",
    re.I,
)
_COMPARED_AFTER = re.compile(
    rf"[\s$*)]*(?:\w+\s+)?(?:or\s+{_MORE}\b|at (?:least|most)\b"
    r"|(?:or|and) (?:above|below|over|under|up)\b(?=\s*(?:[.,;!?)]|$)))",
    re.I,
)
_COMPARED = re.compile(rf"{_DENIAL}|{_COMPARISON}|\b(?:and|or|to|through|from)\b", re.I)
_LONGEST_DENIAL = 120


def is_denied(text: str, start: int, end: int | None = None, is_answer: bool = False) -> bool:
    """Whether the words of the clause before `start` or after `end` deny or doubt what is there.
    is_answer: in the text of an answer, "at least 7" does not state 7."""
    rule = _NOT_STATED if is_answer else _DENIED
    if rule.search(clause_before(text, start)):
        return True
    if _DENIED_BY_COLON.search(text[max(0, start - _LONGEST_DENIAL) : start]):
        return True
    if end is None:
        return False

    after = text[end : end + _LONGEST_DENIAL]
    is_compared = is_answer and _COMPARED_AFTER.match(after) is not None
    return is_compared or _DENIED_AFTER.match(after) is not None


def without_comparisons(text: str) -> str:
    """The text without the words that deny a number, compare with it, or join it to the next."""
    return _COMPARED.sub("", text)


def clause_before(prose: str, position: int) -> str:
    """The clause before the position."""
    first = max(0, position - _LONGEST_DENIAL)
    starts = (prose.rfind(mark, first, position) + 1 for mark in ".,;:?\n")
    return prose[max(first, *starts) : position]
