"""What a sample says of its reward: remarks of reward functions, and errors."""

from collections.abc import Mapping
from itertools import islice
from typing import Literal

from distflow.observe.metrics import TIMED_OUT

RIGHT = 1.0 - 1e-6
"""The accuracy from which a response is correct."""

_MAX_REMARKS = 500


def remarks(row: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The row's `extra` by part of the reward: its keys are PART/KEY, and a part may be a path."""
    extra = row.get("extra")
    scored = row.get("reward_parts")
    if isinstance(scored, Mapping):
        parts = sorted(map(str, scored), key=len, reverse=True)[:_MAX_REMARKS]
    else:
        parts = []

    found: dict[str, dict[str, object]] = {}
    if isinstance(extra, Mapping):
        for name, value in islice(extra.items(), _MAX_REMARKS):
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
    if any(str(text).startswith(TIMED_OUT) for text in texts):
        return "timeout"
    return "error"
