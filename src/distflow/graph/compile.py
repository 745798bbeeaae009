"""Compiling a bound node: what its function is called with, closed over everything that does not change."""

from collections.abc import Callable, Mapping
from typing import Protocol

from distflow.config.errors import hint
from distflow.graph.errors import PipelineError
from distflow.graph.program import BoundNode
from distflow.graph.roles import NodeType


class Columns(Protocol):
    """What a node reads from: a batch, or a prompt group on its way to one."""

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> object: ...


Arguments = tuple[list[object], dict[str, object]]
Inputs = Callable[[Columns, Mapping[str, object]], Arguments]
"""(columns, what this call has of `batch`, `samples`, `group`, `ctx`) → positional and keyword arguments."""


def compile_inputs(node: BoundNode, resources: Mapping[str, object]) -> Inputs:
    """The arguments of the node's function, from its columns. Its engines, services and options are looked up now.

    resources: engines and services by name; `reduce`, over the ranks that have samples of their own; for a barrier
    `team`, over all that run the node. The function itself is not called here, so that a stack shows it right below
    the loop over nodes.
    Raises PipelineError where the node needs an engine or a service that this worker has not.
    """
    contract = node.contract
    fixed = {name: _resource(node, name, resources) for name in (*contract.engines, *contract.services)}
    if "engine" in contract.reserved:
        fixed["engine"] = _resource(node, node.engines[0], resources)
    if "reduce" in contract.reserved:
        is_barrier = node.node_type is NodeType.BARRIER_SYNC
        fixed["reduce"] = _resource(node, "team" if is_barrier else "reduce", resources)
    if "config" in contract.reserved:
        fixed["config"] = node.config
    of_the_call = [name for name in contract.reserved if name not in fixed]
    fixed |= node.options
    required = frozenset(contract.reads)

    def inputs(columns: Columns, call: Mapping[str, object]) -> Arguments:
        positional = [_present(columns, name) for name in contract.by_position]
        keyword = {name: columns[name] for name in contract.by_keyword if name in required or name in columns}
        return positional, {**keyword, **{name: call[name] for name in of_the_call}, **fixed}

    return inputs


def _present(columns: Columns, name: str) -> object:
    return columns[name] if name in columns else None  # noqa: SIM401  columns are no dict


def _resource(node: BoundNode, name: str, resources: Mapping[str, object]) -> object:
    if name not in resources:
        raise PipelineError(
            f"node '{node.node_id}' needs '{name}', which the worker that runs it has not{hint(name, resources)}"
        )
    return resources[name]
