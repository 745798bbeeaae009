"""Options of node functions: which a function takes, and their values under a config."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from types import SimpleNamespace, UnionType
from typing import Union, get_args, get_origin

from distflow.config.errors import hint
from distflow.graph.contract import REQUIRED, Contract
from distflow.graph.errors import PipelineError
from distflow.graph.nodes import Node

_PLAIN_TYPES = {t.__name__: t for t in (bool, int, float, str)}


@dataclass(frozen=True)
class ConfigGroup:
    """What a node receives of the config. `key` is its dotted key: "" for all, None if it is the node's own."""

    value: object
    key: str | None

    def has(self, name: str) -> bool:
        return name in dir(self.value)  # asked by name alone: looking at the value would count as using the key

    def names(self) -> list[str]:
        return [name for name in dir(self.value) if not name.startswith("_")]


def lookup(config: object, key: str, where: str) -> object:
    """The value of a dotted key. Raises PipelineError with the nearest key."""
    value = config
    for part in key.split(".") if key else ():
        names = [name for name in dir(value) if not name.startswith("_")]
        attribute = part if part in names else f"{part}_"  # `async` is `async_` in Python
        if attribute not in names:
            raise PipelineError(f"{where}: the config has no '{part}' (of '{key}'){hint(part, names)}")
        value = getattr(value, attribute)
    return value


def group_of(node: Node, config: object) -> ConfigGroup:
    """The config group that the node receives: its own, the one it names, or its role's."""
    if isinstance(node.config, Mapping):
        return ConfigGroup(SimpleNamespace(**node.config), None)
    key = node.by_role.config if node.config is None else node.config
    return ConfigGroup(lookup(config, key, f"{node.where} of role {node.node_role.name}"), key)


_SETTINGS = tuple(item.name for item in fields(Node) if item.init and item.name != "options")
_NOT_HERE = {
    "agent_group": "is not there yet: it will come with several agents in one program",
    "filter_plugin": "has no meaning here: a filter is a node of its own, whose function returns Drop(reason) for a "
    "prompt group",
}
"""Arguments of other systems' `add_node`."""


def check_options(node: Node, contract: Contract) -> None:
    """Raises PipelineError for an option that the function does not take or whose type it does not have."""
    for name, value in node.options.items():
        if name in contract.options or contract.open_options:
            _check_type(node, contract, name, value)
        elif name in _NOT_HERE:
            raise PipelineError(f"{node.where}: '{name}' {_NOT_HERE[name]}")
        else:
            known = [*contract.options, *_SETTINGS]
            raise PipelineError(f"{node.where}: its function takes no option '{name}'{hint(name, known)}")


def check_own_config(node: Node, contract: Contract) -> None:
    """Raises PipelineError for an entry of the node's own `config` mapping that its function cannot receive."""
    if not isinstance(node.config, Mapping) or contract.open_options or "config" in contract.reserved:
        return
    for name in node.config:
        if name not in contract.options:
            raise PipelineError(
                f"{node.where}: config has '{name}', which its function does not take{hint(name, contract.options)}"
            )


def resolve_options(node: Node, contract: Contract, group: ConfigGroup) -> dict[str, object]:
    """Values of all options.

    `add_node` and what a `functools.partial` sets go before the group, and that before the function's default.

    Raises PipelineError for an option without a value.
    """
    preset = node.fn.keywords if isinstance(node.fn, functools.partial) else {}
    fixed = {**{name: value for name, value in preset.items() if name in contract.options}, **node.options}
    values: dict[str, object] = {}
    for name, default in contract.options.items():
        if name in fixed:
            continue
        if group.has(name):
            values[name] = getattr(group.value, name)
        elif default is not REQUIRED:
            values[name] = default
        else:
            where = "its config" if group.key is None else f"config group '{group.key}'" if group.key else "the config"
            raise PipelineError(
                f"{node.where}: option '{name}' has no value: add_node gives none, {where} has no such key"
                f"{hint(name, group.names())}, and the function has no default"
            )
    return {**values, **fixed}


def _check_type(node: Node, contract: Contract, name: str, value: object) -> None:
    wanted = _plain_types(node, name) if name in contract.options else ()
    if not wanted or value is None:
        return
    fits = type(value) in wanted or (isinstance(value, int) and not isinstance(value, bool) and float in wanted)
    if not fits:
        names = " or ".join(t.__name__ for t in wanted)
        raise PipelineError(f"{node.where}: option '{name}' must be {names}, {value!r} given")


def _plain_types(node: Node, name: str) -> tuple[type, ...]:
    """bool, int, float, str as the parameter is annotated; empty where it says something else."""
    try:
        parameter = signature(node.fn).parameters.get(name)
    except (ValueError, TypeError):
        return ()
    annotation = Parameter.empty if parameter is None else parameter.annotation
    if isinstance(annotation, str):  # postponed annotations
        words = [part.strip() for part in annotation.split("|")]
        parts: tuple[object, ...] = tuple(_PLAIN_TYPES.get(word, word) for word in words)
    else:
        parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = tuple(part for part in parts if isinstance(part, type) and part in _PLAIN_TYPES.values())
    none = sum(part in (None, "None", type(None)) for part in parts)
    return plain if len(plain) + none == len(parts) else ()
