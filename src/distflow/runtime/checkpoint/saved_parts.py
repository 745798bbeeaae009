"""The parts of a checkpoint."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from distflow.config import to_dict
from distflow.data import global_random_states
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.planning.plan import dp_groups_of
from distflow.runtime.checkpoint.files import is_sharded, own_shards, shard_name
from distflow.runtime.checks_protocol import CHECK_STATE
from distflow.runtime.node_context import NodeState
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
    ranks. checks: describes a rank's memory. The very first rank writes the parts of the run. The
    last part holds the rank's random generators and what `checks` returns; it completes the rank's
    parts.
    """
    point = None
    yield from _engine_parts(spec, resources, rank)

    if rank == 0:
        point = resume_point()
        if point.queued:
            yield "live", Batch.concat([group.data for group in point.queued.values()]).to_tensors()
        measured = {str(number): list(group.measured) for number, group in point.queued.items()}
        run = {
            "config": to_dict(spec.config),
            "facts": {**spec.facts, **resources.facts},
            "coordinator": point.snapshot,
            "live_measured": measured,
            "nodes": state,
        }
        yield "run", run

    yield part_of_rank(rank), {**_generator_states(), "checks": dict(checks(state, point))}


def _engine_parts(spec: Spec, resources: Resources, rank: int) -> Iterator[tuple[str, object]]:
    """Each rank writes its own shards of sharded tensors; the first rank that trains a model writes
    the tensors that all of them have."""
    trainers = list(chain.from_iterable(dp_groups_of(spec.plan)))
    for role, engine in resources.trained().items():
        with_role = [i for i, each in enumerate(trainers) if role in spec.plan.ranks[each].engines]
        leads = rank == with_role[0]

        saved = engine.state()
        if is_sharded(saved.tensors):
            yield shard_name(role, rank), own_shards(saved.tensors, leads)
        elif leads:
            yield role, saved.tensors

        if leads:
            yield f"{role}_meta", saved.meta


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
    found: NodeState = {}
    checks = dict[str, Any]()
    updates = dict[str, int]()
    for state in reversed(states):
        found |= state
        own = state.get(CHECK_STATE, {})
        checks |= own
        updates |= own.get("updates", {})

    if CHECK_STATE in found:
        found[CHECK_STATE] = {**checks, "updates": updates}
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
        wrong = [] if node == CHECK_STATE else _no_json(own)
        if wrong:
            raise UserError(
                f"node '{node}' has {wrong[0]!r:.100} in its ctx.state, which no checkpoint can "
                "hold: use str as keys, lists instead of tuples and sets, and plain numbers "
                "instead of tensors and arrays"
            )

    return copied


def _no_json(value: object) -> list[object]:
    """What is no JSON value within it, and keys that are not a str."""
    if value is None or isinstance(value, str | int | float):
        return []
    if not isinstance(value, dict | list):
        return [value]

    found = list[object]()
    if isinstance(value, dict):
        found += [key for key in value if not isinstance(key, str)]
        value = list(value.values())

    for each in value:
        found += _no_json(each)
    return found
