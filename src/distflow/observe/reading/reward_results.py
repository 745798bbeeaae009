"""What the reward functions reported on a sample, from its row in the samples file: by part, and in one line."""

from collections.abc import Mapping
from typing import Literal

from distflow.observe.sanitize import escape_control

TIMED_OUT = "no score within"
"""How the text of a reward error begins that is a timeout."""
RIGHT = 1.0 - 1e-6


def remarks(row: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """`extra` of the row by part of the reward: its keys are PART/KEY, and a part may be a path."""
    extra, scored = row.get("extra"), row.get("reward_parts")
    parts = sorted(map(str, scored), key=len, reverse=True) if isinstance(scored, Mapping) else []
    found: dict[str, dict[str, object]] = {}
    for name, value in extra.items() if isinstance(extra, Mapping) else ():
        part = next((part for part in parts if str(name).startswith(f"{part}/")), str(name).partition("/")[0])
        key = str(name).removeprefix(part).removeprefix("/")
        if key != "acc":  # the row's own
            found.setdefault(part, {})[key] = value
    return found


def failure(row: Mapping[str, object]) -> Literal["error", "timeout"] | None:
    """Why the row has no score; None where it has one."""
    errors = row.get("errors")
    if not errors:
        return None
    texts = errors if isinstance(errors, list) else [errors]
    return "timeout" if any(str(text).startswith(TIMED_OUT) for text in texts) else "error"


def is_right(row: Mapping[str, object]) -> bool | None:
    """Whether the response counts as correct; None if that is unknown."""
    accuracy = row.get("acc") if row.get("acc") is not None else row.get("score")
    return accuracy >= RIGHT if isinstance(accuracy, int | float) and not row.get("errors") else None


def in_short(row: Mapping[str, object], most: int = 160) -> str:
    """What to look at first, in one line for the terminal; empty if the reward functions reported only a score."""
    if errors := row.get("errors"):
        return escape_control(str(errors[0] if isinstance(errors, list) else errors), most, one_line=True)
    shown = [f"{part}: {said}" for part, own in remarks(row).items() if (said := _short(own))]
    return escape_control("; ".join(shown), most, one_line=True)


def _short(said: Mapping[str, object]) -> str:
    failed, followed = said.get("failed"), said.get("followed")
    if isinstance(failed, list) and failed and isinstance(failed[0], Mapping):
        return f"{failed[0].get('case')}: {failed[0].get('why')}"
    if isinstance(followed, Mapping):
        broken = [str(name) for name, kept in followed.items() if not kept]
        return f"not followed: {', '.join(broken)}" if broken else f"all {len(followed)} followed"
    if "extracted" in said:
        found = said["extracted"]
        return f"{'no answer' if found is None else found}, wanted {said.get('wanted')}"
    return str(said["reason"]) if said.get("reason") else ""
