"""The formulas of the tables, for sizes: of a device, a step or a prompt, as each system counts
them."""

import ast
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


def _product(left: object, right: object) -> float:
    """Of numbers: a text times a number would be as long as a file wants."""
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise TypeError("it is no product of numbers")
    return left * right


_IN_FORMULAS: dict[str, Any] = {
    "max": max,
    "min": min,
    "len": len,
    "bool": bool,
    "isinstance": isinstance,
    "list": list,
    "map": map,
    "product": _product,
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


def compute(
    table: tables.Table,
    theirs: ForeignSettings,
    values: dict[str, object],
    devices: int | None,
    missing: list[str],
) -> Computed:
    """A name that is no key is a step of others."""
    found = Computed()
    names: dict[str, Any] = {_DOT.sub("__", key): value for key, value in values.items()}
    sources: dict[str, set[str]] = {}
    """Their keys that a step or a key comes from."""
    formulas = entries_for(table.computed, theirs.method)
    names["share"] = partial(_share, values.get("max_steps"))
    names["devices"] = devices
    read = set[str]()
    says_devices = any(key.endswith(("n_gpus_per_node", "num_gpus_per_node")) for key in values)
    if not (names["devices"] or says_devices) and (
        theirs.system == "TRL" or theirs.method in ("sft", "rm")
    ):
        names["devices"] = 1
        missing.append(
            "devices: their number is not in the file; 1 is assumed, set another with --devices N"
        )
    made = list[Unread]()
    for ours, formula in formulas.items():
        code = _compiled(formula)
        own = {name: names.get(name) for name in code.co_names if name not in _IN_FORMULAS}
        unread = next((each for each in own.values() if isinstance(each, Unread)), None)
        try:
            # the formulas are the package's own
            value = unread or eval(code, {"__builtins__": _IN_FORMULAS}, own)
            value = _whole(ours, value, missing)
        except (TypeError, AttributeError, LookupError, ArithmeticError):
            lacking = ", ".join(
                name.replace("__", ".") for name, value in own.items() if value is None
            )
            why = f"it cannot be computed from the file{lacking and f', which has no {lacking}'}"
            made.append(value := Unread(why))
        except ValueError as error:  # raised by what formulas call
            made.append(value := Unread(str(error)))
        names[_DOT.sub("__", ours)] = value
        if isinstance(value, Unread):  # one of the file is reported as such
            given = {
                name.replace("__", "."): each
                for name, each in own.items()
                if isinstance(each, int | float)
            }
            named = [(key, table.find(key)) for key in given.keys() & theirs.values]
            same = {key for key, name in named if key == ours or name and name.ours == ours}
            found.used |= same  # in another unit
            is_said = same or is_known(ours) and any(value is each for each in made)
            of_keys = f" (from {', '.join(sorted(same))})" if same - {ours} else ""
            missing += [f"{ours}: {value.why}{of_keys}"] if is_said else []
            continue
        parts = [name.replace("__", ".") for name in own]
        sources[ours] = set[str]().union(
            *({name} if name == ours else sources.get(name, {name}) for name in parts)
        )
        # a key that is theirs too
        read |= sources[ours] if value is not None else sources[ours] - {ours}
        if value is not None and is_known(ours):
            found.used |= sources[ours]
            found.overrides[ours] = "null" if value == "null" else tables.as_override(value)
            if not sources[ours].isdisjoint(theirs.values):
                found.given.add(ours)
    apart = {
        key
        for key in read | found.used
        if _is_apart(key, values.get(key), table, theirs.method, formulas)
    }
    found.used -= apart
    found.idle = read - found.used - apart
    return found


@cache
def _compiled(formula: str) -> CodeType:
    tree = _Products().visit(ast.parse(_DOT.sub("__", formula), mode="eval"))
    return compile(ast.fix_missing_locations(tree), formula, "eval")


class _Products(ast.NodeTransformer):
    """Makes each product a call of `product`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:  # the name that ast calls
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult):
            return node
        return ast.Call(ast.Name("product", ast.Load()), [node.left, node.right], [])


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
    name = table.find(key, method)
    text = f"{key}=" if is_known(key) else name.overrides(value) if name else ""
    return bool(text) and formulas.keys().isdisjoint(tables.split_overrides(text))
