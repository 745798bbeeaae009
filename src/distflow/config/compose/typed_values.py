"""Strict conversion of plain data to a key's type, with advice for values that do not fit."""

import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from distflow.config.keys.declare import KeyInfo, dotted
from distflow.config.migration.tables import find_synonyms
from distflow.errors import nearest

Differing = dict[str, dict[str, Any]]
"""Values of a group's keys that differ by domain, `{code: {adv_estimator: reinforce}}`; keys are
dotted names within the group."""

# YAML 1.1 reads 1e-6 (no dot) as a string; people mean the number.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_SCALARS = (bool, int, float, str)
_MOST_BITS = 63


class Mismatch(ValueError):
    """A value that a key cannot have: what is wrong with it, and what to write instead."""

    def __init__(self, what: str, advice: str = ""):
        super().__init__(what)
        self.what = what
        self.advice = advice


def convert(value: object, annotation: object) -> object:
    """The value as that type; lists become tuples if the type is a tuple. Raises Mismatch."""
    origin = get_origin(annotation)
    if annotation in (Any, object):
        return value
    if annotation is type(None) and value is None:
        return None
    if origin in (Union, types.UnionType):
        return _convert_union(value, annotation)
    if origin is Literal and value in get_args(annotation):
        return value
    if annotation in _SCALARS:
        return _convert_scalar(value, annotation)
    if origin in (tuple, list) or annotation in (tuple, list):
        return _convert_sequence(value, annotation)
    if (origin or annotation) is dict:
        return _convert_mapping(value, annotation)
    raise Mismatch(f"is {show(value)}, not of type {type_name(annotation)}")


def can_convert(annotation: object) -> bool:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        return True

    known = annotation in (*_SCALARS, Any, object, type(None), list, tuple, dict)
    return known or (
        origin in (Union, types.UnionType, list, tuple, dict)
        and all(argument is Ellipsis or can_convert(argument) for argument in arguments)
    )


def type_name(annotation: object) -> str:
    """The type in Python's notation, e.g. `list[str] | None`; a tuple is a list, as in YAML."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_name(argument) for argument in arguments))
    if annotation in _SCALARS:
        return annotation.__name__
    if annotation is type(None):
        return "None"
    if origin is Literal:
        return " | ".join(show(choice) for choice in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"[{', '.join(type_name(argument) for argument in arguments)}]"
    if origin in (tuple, list) or annotation in (tuple, list):
        if arguments and arguments[0] in _SCALARS:
            return f"list[{type_name(arguments[0])}]"
        return "list"
    if (origin or annotation) is dict:
        if set(arguments[1:]) & set(_SCALARS):
            return f"dict[{', '.join(map(type_name, arguments))}]"
        return "dict"

    return "any"


def check_bounds(value: object, info: KeyInfo) -> Iterator[Mismatch]:
    """Problems of a value of the right type: choices, bounds, parts that are not implemented
    yet."""
    spec = info.spec
    if value is None or value == info.default:
        return

    if spec.later is True:
        yield Mismatch(
            f"is {show(value)}, which is not implemented yet",
            f"keep the default {show(info.default)}",
        )
    elif spec.choices and not spec.open_names:
        for name in value if isinstance(value, tuple) else (value,):
            yield from _check_choice(name, info)
    elif isinstance(value, int | float) and not spec.has_room_for(value):
        yield Mismatch(
            f"is {show(value)} and must be {spec.allowed()}",
            spec.advice or f"write a number {spec.allowed()}",
        )


def parse_value(given: object, info: KeyInfo) -> object:
    """The value of a key from plain data, without a check of its bounds. Python's None is null for
    a key that may be null. Raises Mismatch."""
    if given == "None" and type(None) in get_args(info.annotation):
        given = None
    if info.spec.parse:
        return info.spec.parse(given)
    return convert(given, info.annotation)


def parse_differing(
    value: object,
    keys: Mapping[str, KeyInfo],
    form: str,
    elsewhere: Callable[[str, str], str] = lambda *_: "",
    of: str = "domain",
) -> Differing:
    """Settings by domain (or by `of`) from nested or dotted plain data. keys: those that may
    differ; form: an example; elsewhere: advice about another key of a domain, or "". Raises
    Mismatch."""
    if not isinstance(value, Mapping):
        raise Mismatch(f"is not a mapping by {of}", form)

    found: Differing = {}
    for name, settings in value.items():
        if not isinstance(name, str) or not isinstance(settings, Mapping):
            raise Mismatch(
                f"has {show(settings)} for {show(name)}, which is not a mapping by {of}", form
            )

        found[name] = {}
        for key, given in flat(settings, "", keys).items():
            if key not in keys:
                advice = f"{did_you_mean(key, keys)}there are {', '.join(keys)}; {form}"
                raise Mismatch(f"has '{key}' for the {of} '{name}'", elsewhere(name, key) or advice)

            try:
                found[name][key] = parse_value(given, keys[key])
                for mismatch in check_bounds(found[name][key], keys[key]):
                    raise mismatch
            except Mismatch as error:
                raise Mismatch(
                    f"has '{key}' of the {of} '{name}', which {error.what}", error.advice
                ) from None

    return found


def plain_differing(found: Differing, keys: Mapping[str, KeyInfo]) -> Differing:
    """The inverse of `parse_differing`."""
    return {
        name: {key: keys[key].spec.plain(value) for key, value in own.items()}
        for name, own in found.items()
    }


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Values by their dotted names as nested plain data."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        place = found
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = _plain(value)

    return found


def flat(
    settings: Mapping[str, object], prefix: str, keys: Mapping[str, KeyInfo]
) -> dict[str, object]:
    """Nested values by their dotted names; a mapping that is the value of one of `keys` stays
    whole."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        key = dotted(prefix, str(name))
        if isinstance(value, Mapping) and key not in keys:
            found |= flat(value, key, keys)
        else:
            found[key] = value

    return found


def did_you_mean(name: str, known: Iterable[str], key: str = "") -> str:
    """The beginning of advice: what other systems' name is here, or the nearest known name; empty
    if there is none. key: whose value it is."""
    names = tuple(known)
    guess = " or ".join(find_synonyms(key, name, names)) or nearest(name, names)
    return f"did you mean {guess}? " if guess else ""


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


def show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"

    return str(value)


def _check_choice(name: object, info: KeyInfo) -> Iterator[Mismatch]:
    spec = info.spec
    later = spec.later if isinstance(spec.later, tuple) else ()
    if name in later:
        there = [choice for choice in spec.choices if choice not in later]
        yield Mismatch(
            f"is {show(name)}, which is not implemented yet", f"choose from {', '.join(there)}"
        )
    elif name not in spec.choices:
        meant = did_you_mean(str(name), spec.choices, info.name)
        more = f". {spec.advice}" if spec.advice else ""
        yield Mismatch(
            f"is {show(name)}, which is not a valid choice",
            f"{meant}the choices are {spec.allowed()}{more}",
        )


def _convert_union(value: object, annotation: object) -> object:
    arms = get_args(annotation)
    if value is None and type(None) in arms:
        return None

    mismatches = []
    for arm in (arm for arm in arms if arm is not type(None)):
        try:
            return convert(value, arm)
        except Mismatch as error:
            mismatches.append(error)

    if len(mismatches) == 1:
        raise mismatches[0]
    wanted = type_name(annotation)
    raise Mismatch(f"is {show(value)}, not of type {wanted}", f"write a value of type {wanted}")


def _convert_scalar(value: object, wanted: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise Mismatch(f"is {value}, not a finite number", "write a finite number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise Mismatch(
            f"is a whole number of more than {_MOST_BITS} bits", "write a smaller number"
        )
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is int and type(value) is float and value.is_integer():
        return int(value)
    if wanted in (int, float) and isinstance(value, str) and _EXPONENT.fullmatch(value):
        return _convert_scalar(float(value), wanted)

    or_default = ""
    if value is None:
        or_default = ", or remove the key to use its default"

    raise Mismatch(
        f"is {show(value)}, not of type {type_name(wanted)}", _advise(value, wanted) + or_default
    )


def _advise(value: object, wanted: object) -> str:
    if wanted is bool:
        return "write true or false"
    if wanted is str and isinstance(value, bool):
        return "put the word in quotes: YAML reads on, yes, off and no as true and false"
    if wanted is str:
        return "put it in quotes; on the command line 'key=\"value\"'"
    return f"write a value of type {type_name(wanted)}, without quotes"


def _convert_sequence(value: object, annotation: object) -> object:
    kind = get_origin(annotation) or annotation
    arguments = get_args(annotation)
    if value is None:
        value = ()
    if isinstance(value, str) and arguments[:1] == (str,):
        value = (value,)
    if not isinstance(value, list | tuple):
        wanted = type_name(annotation)
        raise Mismatch(f"is {show(value)}, not of type {wanted}", "write a list, e.g. [a, b]")
    if kind is tuple and arguments and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise Mismatch(
                f"has {len(value)} entries, not {len(arguments)}", f"write {type_name(annotation)}"
            )

        return tuple(
            convert(item, argument) for item, argument in zip(value, arguments, strict=True)
        )

    items = [convert(item, arguments[0]) if arguments else item for item in value]
    return tuple(items) if kind is tuple else items


def _convert_mapping(value: object, annotation: object) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise Mismatch(f"is {show(value)}, not a mapping", "write {name: value, ...}")

    arguments = get_args(annotation)
    if not arguments:
        return dict(value)

    return {
        convert(name, arguments[0]): convert(item, arguments[1]) for name, item in value.items()
    }


def parse_band(value: object, of_shares: bool = False) -> object:
    """[low, high], or None; of_shares: within 0..1. Raises Mismatch."""
    band: Any = convert(value, tuple[float, float] | None)
    if band is not None and not (0 <= band[0] < band[1] <= 1 if of_shares else band[0] <= band[1]):
        what = "holds no number"
        if of_shares:
            what = "is no range within 0..1"
        raise Mismatch(f"is {show(value)}, which {what}", "write e.g. [0.1, 0.9]")

    return band


parse_share_band = partial(parse_band, of_shares=True)
