"""One answer as the report shows it: what was said of it by part of the reward, long texts without their middle."""

import math
from collections.abc import Mapping

from distflow.observe.verdicts import failure, remarks

MAX_TEXT = 4000
_TEXT_KEYS = ("response", "errors", "reward_parts")
_KEYS = ("score", "acc", "advantage", "masked", "response_length", "finish_reason", "versions", "kind", "dropped")


def cut_answer(row: Mapping[str, object], max_text: int = MAX_TEXT) -> dict[str, object]:
    """The keys that the report shows, with long texts cut in their middle (the end holds the answer).

    A score that stands for a missing verdict is left out, and so is what is empty.
    """
    shown = {key: cut(row.get(key), max_text if key in _TEXT_KEYS else 200) for key in (*_TEXT_KEYS, *_KEYS)}
    shown |= {"told": cut(remarks(row), max_text), "failure": failure(row)}
    if isinstance(versions := row.get("versions"), list):
        known = [v for v in versions if isinstance(v, int) and v >= 0]
        shown["versions"] = sorted({min(known), max(known)}) if known else []
    if row.get("errors"):
        shown["score"] = shown["acc"] = None
    if shown["acc"] == shown["score"]:
        shown["acc"] = None
    for key in ("score", "advantage", "masked"):
        if isinstance(value := shown[key], float) and math.isfinite(value):
            shown[key] = float(f"{value:.5g}")
    if not shown["masked"]:
        shown["masked"] = None
    return {key: value for key, value in shown.items() if value is not None and value != [] and value != {}}


def cut(value: object, max_text: int) -> object:
    """Texts of at most about so many characters, and 50 entries of what has more."""
    if isinstance(value, str) and len(value) > max_text:
        half = max_text // 2
        return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters left out …]\n{value[-half:]}"
    if isinstance(value, Mapping):
        return {str(key)[:100]: cut(item, max_text) for key, item in list(value.items())[:50]}
    if isinstance(value, list):
        return [cut(item, max_text) for item in value[:50]]
    return value
