"""Options of node functions: which a function takes, their values under a config, and keys that nothing takes."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin

from distflow.config.errors import hint
from distflow.graph.contract import REQUIRED, Contract, Form
from distflow.graph.errors import PipelineError
from distflow.graph.nodes import Node
from distflow.graph.roles import ROLE_GROUP

_PLAIN_TYPES = {t.__name__: t for t in (bool, int, float, str)}


@dataclass(frozen=True)
class Group:
    """What a node receives of the config. `key` is its dotted key: "" for all, None if it is the node's own."""

    value: Any
    key: str | None

    def has(self, name: str) -> bool:
        return self.value is not None and hasattr(self.value, name)

    def names(self) -> list[str]:
        return [name for name in dir(self.value) if not name.startswith("_")]

    def dotted(self, name: str) -> str | None:
        """The dotted key of an entry of the group."""
        return None if self.key is None else f"{self.key}.{name}" if self.key else name


def lookup(config: Any, key: str, where: str) -> Any:
    """The value of a dotted key. Raises PipelineError with the nearest key."""
    value = config
    for part in key.split(".") if key else ():
        attribute = part if hasattr(value, part) else f"{part}_"  # `async` is `async_` in Python
        if not hasattr(value, attribute):
            names = [name for name in dir(value) if not name.startswith("_")]
            raise PipelineError(f"{where}: the config has no '{part}' (of '{key}'){hint(part, names)}")
        value = getattr(value, attribute)
    return value


def group_of(node: Node, config: Any) -> Group:
    """The config group that the node receives: its own, the one it names, or its role's."""
    if isinstance(node.config, Mapping):
        return Group(SimpleNamespace(**node.config), None)
    key = ROLE_GROUP[node.node_role] if node.config is None else node.config
    return Group(lookup(config, key, f"{node.where} of role {node.node_role.name}"), key)


def check_options(node: Node, contract: Contract) -> None:
    """Raises PipelineError for an option that the function does not take or whose type it does not have."""
    for name, value in node.options.items():
        if name not in contract.options and not contract.open_options:
            what = f"its function takes no option '{name}'"
            known = [*contract.options, "node_type", "node_role", "only_forward_compute", "config", "agent_group"]
            raise PipelineError(f"{node.where}: {what}{hint(name, [*known, 'retry_limit', 'filter_plugin', 'scope'])}")
        _check_type(node, contract, name, value)


def check_own_config(node: Node, contract: Contract) -> None:
    """Raises PipelineError for an entry of the node's own `config` mapping that its function cannot receive."""
    if not isinstance(node.config, Mapping) or contract.open_options or "config" in contract.reserved:
        return
    for name in node.config:
        if name not in contract.options:
            raise PipelineError(
                f"{node.where}: config has '{name}', which its function does not take{hint(name, contract.options)}"
            )


def groups_taken(contract: Contract, group: Group) -> tuple[str, ...]:
    """The groups of which a function that declares no `takes` may take any key: it is handed them whole."""
    if contract.form is Form.BATCH_CTX:
        return ("",)  # the context holds the whole config
    return (group.key,) if "config" in contract.reserved and group.key is not None else ()


def resolve_options(node: Node, contract: Contract, group: Group) -> tuple[dict[str, Any], frozenset[str]]:
    """Values of all options, and the config keys that gave one.

    `add_node` and what a `functools.partial` sets go before the group, and that before the function's default.

    Raises PipelineError for an option without a value.
    """
    preset = node.fn.keywords if isinstance(node.fn, functools.partial) else {}
    fixed = {**{name: value for name, value in preset.items() if name in contract.options}, **node.options}
    values: dict[str, Any] = {}
    keys: set[str] = set()
    for name, default in contract.options.items():
        if name in fixed:
            continue
        if group.has(name):
            values[name] = getattr(group.value, name)
            keys.update(key for key in [group.dotted(name)] if key)
        elif default is not REQUIRED:
            values[name] = default
        else:
            where = "its config" if group.key is None else f"config group '{group.key}'" if group.key else "the config"
            raise PipelineError(
                f"{node.where}: option '{name}' has no value: add_node gives none, {where} has no such key"
                f"{hint(name, group.names())}, and the function has no default"
            )
    return {**values, **fixed}, frozenset(keys)


def inert_keys(taken: Iterable[str], set_keys: Iterable[str], always_taken: Iterable[str] = ()) -> list[str]:
    """The keys of `set_keys` that nothing takes, in their order.

    Keys are dotted. Taking a group takes all under it, setting a group sets something of it that may be taken;
    "" is the whole config.
    """
    covers = {*taken, *always_taken}
    return [key for key in dict.fromkeys(set_keys) if not any(_overlap(key, other) for other in covers)]


def _overlap(key: str, taken: str) -> bool:
    return taken == "" or key == taken or key.startswith(f"{taken}.") or taken.startswith(f"{key}.")


def _check_type(node: Node, contract: Contract, name: str, value: Any) -> None:
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
        parts: tuple[Any, ...] = tuple(_PLAIN_TYPES.get(part.strip(), part.strip()) for part in annotation.split("|"))
    else:
        parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = tuple(part for part in parts if part in _PLAIN_TYPES.values())
    none = sum(part in (None, "None", type(None)) for part in parts)
    return plain if len(plain) + none == len(parts) else ()
