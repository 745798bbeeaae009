"""The parts of a checkpoint."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from distflow.config import to_dict
from distflow.data import global_random_states
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.planning.plan import dp_groups_of
from distflow.runtime.checkpoint.files import is_sharded, own_shards, shard_name
from distflow.runtime.checks_protocol import CHECK_STATE
from distflow.runtime.compiled_node import NodeState
from distflow.runtime.resources import Resources
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.runtime.spec import Spec


def saved_parts(
    spec: Spec,
    resources: Resources,
    resume_point: Callable[[], ResumePoint[Batch]],
    state: NodeState,
    rank: int = 0,
    checks: Callable[
        [NodeState, ResumePoint[Batch] | None], Mapping[str, object]
    ] = lambda state, point: {},
) -> Iterator[tuple[str, object]]:
    """The parts of a checkpoint that one rank writes, by name: tensors, shards of tensors, or JSON
    values.

    resume_point: called only by the first rank. state: of all nodes. rank: among the training
    ranks. Each rank writes its own shards of sharded tensors; the first rank that trains a model
    writes the tensors that all of them have, and the very first rank the parts of the run. The last
    part holds the rank's random generators, and what `checks` finds in its memory; it completes the
    rank's parts.
    """
    point = None
    trainers = [each for dp_group in dp_groups_of(spec.plan) for each in dp_group]
    for role, engine in resources.trained().items():
        first = next(
            place for place, each in enumerate(trainers) if role in spec.plan.ranks[each].engines
        )
        saved = engine.state()
        leads = rank == first
        if is_sharded(saved.tensors):
            yield shard_name(role, rank), own_shards(saved.tensors, leads)
        elif leads:
            yield role, saved.tensors
        if leads:
            yield f"{role}_meta", saved.meta
    if rank == 0:
        point = resume_point()
        if point.queued:
            yield "live", Batch.concat([group.data for group in point.queued.values()]).to_tensors()
        measured = {str(number): list(group.measured) for number, group in point.queued.items()}
        facts = {**spec.facts, **resources.facts}
        run = {"config": to_dict(spec.config), "facts": facts, "coordinator": point.snapshot}
        yield "run", {**run, "live_measured": measured, "nodes": state}
    yield part_of_rank(rank), {**_generator_states(), "checks": dict(checks(state, point))}


def part_of_rank(rank: int) -> str:
    """The name of the last part that a rank writes."""
    return f"rank_{rank}"


def _generator_states() -> dict[str, object]:
    name, keys, *rest = np.random.get_state()
    device = global_random_states.device_module()
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "device": [state.tolist() for state in device.get_rng_state_all()] if device else [],
    }


def merge_node_states(states: Sequence[NodeState]) -> NodeState:
    """The state of all nodes from the states of all ranks; for a node that several ranks run, the
    first one's. The checks' count of a model's updates exists only on the ranks that train it."""
    found = {node: kept for state in reversed(states) for node, kept in state.items()}
    merged: dict[str, object] = {}
    updates: dict[str, int] = {}
    for state in reversed(states):
        own = state.get(CHECK_STATE, {})
        merged |= own
        updates |= own.get("updates", {})
    if any(CHECK_STATE in state for state in states):
        found[CHECK_STATE] = {**merged, "updates": updates}
    return found


def copy_of_state(state: NodeState) -> NodeState:
    """A copy. Nodes of the rollout loop may run meanwhile; a state that changes while copied is
    copied again. Raises UserError for a state that JSON cannot represent or would change, so that a
    resumed run would have another one."""
    while True:
        try:
            copied = copy.deepcopy(state)
            break
        except RuntimeError as err:
            if "during iteration" not in str(err):
                raise
    for node, own in copied.items():
        if node != CHECK_STATE and (fault := _not_json(own)):
            raise UserError(
                f"node '{node}' has {fault[0]!r:.100} in its ctx.state, which no checkpoint can "
                "hold: use str as keys, "
                "lists instead of tuples and sets, and plain numbers instead of tensors and arrays"
            )
    return copied


def _not_json(value: object) -> list[object]:
    """The first value within it that is no JSON value, or a key that is not a str; empty if there
    is none."""
    if value is None or isinstance(value, str | int | float):
        return []
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, str)]
        return odd or next(filter(None, map(_not_json, value.values())), [])
    return next(filter(None, map(_not_json, value)), []) if isinstance(value, list) else [value]
