"""What a sample says of its reward: remarks of reward functions, errors, whether it is right."""

from collections.abc import Mapping
from itertools import islice
from typing import Literal

from distflow.observe.metrics import TIMED_OUT
from distflow.observe.sanitized_output import escape_control

RIGHT = 1.0 - 1e-6
"""The accuracy from which a response is correct."""

_MAX_REMARKS = 500
_MAX_SHORT = 160


def remarks(row: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The row's `extra` by part of the reward: its keys are PART/KEY, and a part may be a path."""
    extra = row.get("extra")
    scored = row.get("reward_parts")
    parts = (
        sorted(map(str, scored), key=len, reverse=True)[:_MAX_REMARKS]
        if isinstance(scored, Mapping)
        else []
    )
    found: dict[str, dict[str, object]] = {}
    for name, value in islice(extra.items(), _MAX_REMARKS) if isinstance(extra, Mapping) else ():
        part = next(
            (part for part in parts if str(name).startswith(f"{part}/")),
            str(name).partition("/")[0],
        )
        key = str(name).removeprefix(part).removeprefix("/")
        if key != "acc":  # `acc` is a field of the row already
            found.setdefault(part, {})[key] = value
    return found


def failure(row: Mapping[str, object]) -> Literal["error", "timeout"] | None:
    """Why the row has no score; None if it has one."""
    errors = row.get("errors")
    if not errors:
        return None
    texts = errors if isinstance(errors, list) else [errors]
    return "timeout" if any(str(text).startswith(TIMED_OUT) for text in texts) else "error"


def is_right(row: Mapping[str, object]) -> bool | None:
    """Whether the response counts as correct; None if that is unknown."""
    accuracy = row.get("acc") if row.get("acc") is not None else row.get("score")
    return (
        accuracy >= RIGHT if isinstance(accuracy, int | float) and not row.get("errors") else None
    )


def in_short(row: Mapping[str, object]) -> str:
    """The most important remark, as one line for the terminal; empty if the reward functions
    reported only a score."""
    if errors := row.get("errors"):
        text = str(errors[0] if isinstance(errors, list) else errors)
    else:
        text = "; ".join(
            f"{part}: {remark}" for part, own in remarks(row).items() if (remark := _short(own))
        )
    return escape_control(text, _MAX_SHORT, one_line=True)


def _short(remark: Mapping[str, object]) -> str:
    failed = remark.get("failed")
    followed = remark.get("followed")
    if isinstance(failed, list) and failed and isinstance(failed[0], Mapping):
        return f"{failed[0].get('case')}: {failed[0].get('why')}"
    if isinstance(followed, Mapping):
        broken = [str(name) for name, kept in followed.items() if not kept]
        return f"not followed: {', '.join(broken)}" if broken else f"all {len(followed)} followed"
    if "extracted" in remark:
        found = remark["extracted"]
        return f"{'no answer' if found is None else found}, wanted {remark.get('wanted')}"
    return str(remark["reason"]) if remark.get("reason") else ""
