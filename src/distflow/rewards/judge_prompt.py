"""The question to a judge about a response, and the parsing of the answer, for judges behind an
endpoint and judges that the run loads."""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from distflow.errors import UserError
from distflow.rewards.reward_results import shortened

_TEMPLATE = Path(__file__).with_name("judge_template.md")
RESPONSE_CHARACTERS = 32_000
"""Longer responses are cut to both ends."""

_NAMES = ["reason", "score"]
SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": _NAMES,
    "additionalProperties": False,
}
# the start of a tag, also in other widths, or struck through
_OPENING = re.compile("[<\uff1c\ufe64\u226e]")
_DECODER = json.JSONDecoder()
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_SHOWN = 200


def fill_template(template: str, values: Mapping[str, object], most_characters: int) -> str:
    """Fill in one pass, so that a value is never taken for a placeholder; the response without
    tags.

    The nonce is the same in every run. A response that contains it would have to contain a hash of
    itself.
    """
    response = str(values["response"])
    sample = [str(values[name]) for name in ("prompt", "ground_truth")]
    nonce = hashlib.sha256(json.dumps([*sample, response]).encode()).hexdigest()[:16]
    response = shortened(_OPENING.sub("&lt;", response), max(most_characters, 2))
    values = {**values, "response": response, "nonce": nonce}
    if unknown := ", ".join(sorted(set(_PLACEHOLDER.findall(template)) - set(values))):
        raise ValueError(f"the judge's template names {unknown}, which is not a column of the row")

    return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)


@functools.cache
def judge_template(template: str) -> str:
    """The template's text: from a file, unless it has a line break or placeholder; "" is the
    built-in one. Raises UserError for an unreadable template, or one without the response."""
    text = template or _TEMPLATE.read_text("utf-8").removesuffix("\n")
    if "\n" not in text and not _PLACEHOLDER.search(text):
        try:
            text = Path(text).expanduser().read_text("utf-8")
        except OSError as error:
            raise UserError(
                f"the judge's template '{template}' cannot be read: {error.strerror or error}"
            ) from error

    if "response" not in _PLACEHOLDER.findall(text):
        raise UserError("the judge's template has no {response}")
    return text


def read_score(content: object) -> dict[str, object]:
    """Score and reason, exactly as in the schema. Raises ValueError."""
    if not isinstance(content, str):
        raise ValueError(f"the judge's reply is not text: {beginning(json.dumps(content))}")

    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"the judge's reply is not JSON: {beginning(content)}") from None

    if not isinstance(found, dict) or set(found) != set(_NAMES):
        raise ValueError(f"the judge's reply is not {{reason, score}}: {beginning(content)}")

    score = found["score"]
    reason = found["reason"]
    if not isinstance(reason, str) or isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(f"the judge's reply is not a score with a reason: {beginning(content)}")
    if not 0 <= score <= 1:  # also false for NaN
        raise ValueError(f"the judge's score is not between 0 and 1: {beginning(content)}")

    return {"score": float(score), "reason": reason}


def score_at_end(answer: str) -> dict[str, object]:
    """The score and reason at the end of a text: a model may think before, and fence it. Raises
    ValueError, also if another score precedes: either may be one that the response told the judge
    to write."""
    answer = answer.rpartition("</think>")[2].strip().removesuffix("```").strip()
    scores = set[object]()
    last = 0
    end = 0
    for place in (match.start() for match in re.finditer(r"\{", answer)):
        with suppress(ValueError, RecursionError):
            if place >= end:
                last = place
                end = _DECODER.raw_decode(answer, place)[1]
                scores.add(read_score(answer[place:end])["score"])

    if len(scores) > 1:
        raise ValueError(f"the judge's reply has several scores: {beginning(answer)}")
    return read_score(answer[last:])


def beginning(text: str) -> str:
    return repr(text[:_SHOWN])
