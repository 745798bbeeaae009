"""The formulas of the tables, for sizes: of a device, a step or a prompt, as each system counts
them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import CodeType
from typing import Any

from distflow.commands.migration.settings import ForeignSettings, Unread
from distflow.config.compose.unknown_keys import is_known
from distflow.config.keys.schema import schema_keys
from distflow.config.migration import tables

_DOT = re.compile(r"(?<=\w)\.(?=[a-z_])")


def _share(total: object, steps: float | None) -> float | None:
    """Steps, which are a share of the total if they are below 1."""
    if not steps or steps >= 1:
        return steps
    if not isinstance(total, int) or total < 1:
        raise ValueError(
            f"{steps:g} is a share of the run, whose number of steps is not in the file"
        )

    return steps * total


_IN_FORMULAS: dict[str, Any] = {
    "max": max,
    "min": min,
    "len": len,
    "bool": bool,
    "isinstance": isinstance,
    "list": list,
    "map": map,
}


def entries_for(
    entries: Mapping[str, Mapping[str, Any]], method: str, *switches: str
) -> dict[str, Any]:
    """The entries of a table for what is trained, in the order in which they hold. switches: keys
    that are on, or groups that are given."""
    kind = "tuning" if method in ("sft", "rm") else "rl"
    parts = ("all", kind, "grpo" if method == "rloo" else method, method, "end", *switches)

    found: dict[str, Any] = {}
    for part in parts:
        for key, value in entries.get(part, {}).items():
            found[key] = value

    return found


@dataclass
class Computed:
    """What the formulas give."""

    overrides: dict[str, str] = field(default_factory=dict)
    """By our keys."""

    given: set[str] = field(default_factory=set)
    """Our keys that come from what the file sets, and not from defaults only."""

    used: set[str] = field(default_factory=set)
    """Their keys that overrides come from."""

    idle: set[str] = field(default_factory=set)
    """Their keys that formulas read, and that change nothing."""

    def take(self, ours: str, result: object, sources: set[str], is_given: bool) -> None:
        """Set a key of ours, unless the name is that of an intermediate result. sources: their
        keys that the result comes from, of which the file sets one or none."""
        if result is None:  # it says nothing of a key that is theirs too
            self.idle |= sources - {ours}
            return
        if not is_known(ours):
            self.idle |= sources
            return

        self.used |= sources
        self.overrides[ours] = "null" if result == "null" else tables.as_override(result)
        if is_given:
            self.given.add(ours)


class Uncomputed(Unread):
    """In place of a value that a formula cannot give: why."""


def compute(
    table: tables.Table,
    theirs: ForeignSettings,
    values: dict[str, object],
    devices: int | None,
    missing: list[str],
) -> Computed:
    """Evaluate the formulas for what is trained, of which later ones may use earlier ones.

    values: of the file and of its system's defaults. devices: None if the values say it. missing:
    gets a line for what cannot be computed.
    """
    if not devices and _is_one_process(theirs, values):
        devices = 1
        missing.append(
            "devices: their number is not in the file; 1 is assumed, set another with --devices N"
        )

    formulas = entries_for(table.computed, theirs.method)
    known: dict[str, object] = {**values, "devices": devices}
    sources: dict[str, set[str]] = {}
    """Their keys that each result comes from."""
    computed = Computed()
    for ours, formula in formulas.items():
        inputs = {key: known.get(key) for key in _keys_in(formula)}
        result = _whole(ours, _evaluate(formula, inputs, values.get("max_steps")), missing)
        known[ours] = result

        if isinstance(result, Unread):
            same = {key for key in inputs if _is_same(key, ours, theirs, table)}
            computed.used |= same  # in another unit
            # what the file does not say is reported where its own key is converted
            if same or (is_known(ours) and isinstance(result, Uncomputed)):
                missing.append(_why_unread(ours, result, same))
            continue

        own = set[str]()
        for key in inputs:
            own |= {key} if key == ours else sources.get(key, {key})
        sources[ours] = own
        computed.take(ours, result, own, is_given=not own.isdisjoint(theirs.values))

    for key in computed.used | computed.idle:
        if _is_apart(key, values.get(key), table, theirs.method, formulas):
            computed.used.discard(key)
            computed.idle.discard(key)

    computed.idle -= computed.used
    return computed


def _is_one_process(theirs: ForeignSettings, values: Mapping[str, object]) -> bool:
    """Whether the number of processes is what the launcher of the system is told, and not in the
    file."""
    if theirs.system != "TRL" and theirs.method not in ("sft", "rm"):
        return False
    return not any(key.endswith(("n_gpus_per_node", "num_gpus_per_node")) for key in values)


def _evaluate(formula: str, own: Mapping[str, object], max_steps: object) -> object:
    """The value of a formula, or why it has none. own: the values of its keys."""
    for value in own.values():
        if isinstance(value, Unread):
            return value

    words = {_DOT.sub("__", key): value for key, value in own.items()}
    words["share"] = partial(_share, max_steps)

    try:
        if "*" in formula and any(isinstance(value, str | list) for value in own.values()):
            raise TypeError("it times a number would be as long as a file wants")
        # the formulas are the package's own
        return eval(_compiled(formula), {"__builtins__": _IN_FORMULAS}, words)
    except ValueError as error:  # raised by `share`
        return Uncomputed(str(error))
    except (TypeError, AttributeError, LookupError, ArithmeticError):
        lacking = ", ".join(key for key, value in own.items() if value is None)
        which = f", which has no {lacking}" if lacking else ""
        return Uncomputed(f"it cannot be computed from the file{which}")


def _why_unread(ours: str, result: Unread, same: set[str]) -> str:
    """same: the keys that are the setting `ours`, in another unit."""
    if same - {ours}:
        return f"{ours}: {result.why} (from {', '.join(sorted(same))})"
    return f"{ours}: {result.why}"


def _is_same(key: str, ours: str, theirs: ForeignSettings, table: tables.Table) -> bool:
    """Whether a number that the file sets is the setting `ours`, in another unit."""
    if not isinstance(theirs.values.get(key), int | float):
        return False
    name = table.find(key)
    return key == ours or (name is not None and name.ours == ours)


@cache
def _compiled(formula: str) -> CodeType:
    return compile(_DOT.sub("__", formula), formula, "eval")


def _keys_in(formula: str) -> list[str]:
    """The keys of theirs, and the earlier results, that a formula reads."""
    names = [*_compiled(formula).co_names]
    return [name.replace("__", ".") for name in names if name not in (*_IN_FORMULAS, "share")]


def _whole(ours: str, value: object, missing: list[str]) -> object:
    """A value whose key takes whole numbers only, rounded up."""
    info = schema_keys().get(ours)
    if not isinstance(value, float) or info is None or int not in info.arms or float in info.arms:
        return value
    if not value.is_integer():
        missing.append(f"{ours}: {value:g} there, rounded up")
    return math.ceil(value)


def _is_apart(
    key: str, value: object, table: tables.Table, method: str, formulas: Mapping[str, str]
) -> bool:
    """Whether a key that a formula reads is a setting besides: no formula computes what it is
    here."""
    if is_known(key):
        return key not in formulas
    name = table.find(key, method)
    text = name.overrides(value) if name else ""
    return bool(text) and formulas.keys().isdisjoint(tables.split_overrides(text))
