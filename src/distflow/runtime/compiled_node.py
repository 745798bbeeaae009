"""A node compiled for calling: everything fixed is closed over, a context passes the rest, and its
output is checked and stored. Training and rollout loops iterate over such steps."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import Batch, Written
from distflow.data.sample import Sample
from distflow.errors import TrustError, UserError, hint
from distflow.graph import (
    SCORE_FIELDS,
    BoundNode,
    Drop,
    NodeOutput,
    NodeRole,
    NodeType,
    PipelineError,
)
from distflow.graph.fields import Axis
from distflow.import_target import is_async, is_ours
from distflow.observe.metrics import Measured
from distflow.runtime.node_context import NodeContext
from distflow.runtime.reward_functions_as_nodes import adapt
from distflow.runtime.rollout_loop.group import Group
from distflow.runtime.rollout_loop.user_calls import DeadlinePassed, PlainCalls, run_async
from distflow.runtime.run_errors import BadOutput, NodeError, node_error, output_error
from distflow.user_values import LARGEST_NUMBER

Versions = Mapping[str, tuple[Tensor, int]]
"""A column that a function gets, and how often it had been changed in place, by name."""

Inputs = Callable[[Batch | Group, Mapping[str, object]], dict[str, object]]
"""(columns, this call's `batch`, `samples`, `group`, `ctx`) → keyword arguments."""


def compile_inputs(node: BoundNode, resources: Mapping[str, object]) -> Inputs:
    """Compile the arguments of the node's function. Engines, services and options are looked up
    now.

    resources: engines and services by name; `reduce`, over the ranks with separate samples; for a
    barrier `dp_group`, over all ranks that run the node. The function is not called here, so that
    stacks show it right below the loop over nodes. Raises PipelineError if the node needs an engine
    or a service that this worker lacks.
    """
    contract = node.contract
    found = {name: name for name in (*contract.engines, *contract.services)}
    if "engine" in contract.reserved:
        found["engine"] = node.engines[0]

    if "reduce" in contract.reserved:
        if node.node_type is NodeType.BARRIER_SYNC:
            found["reduce"] = "dp_group"
        else:
            found["reduce"] = "reduce"

    for name in found.values():
        if name not in resources:
            raise PipelineError(
                f"node '{node.node_id}' needs '{name}', which its worker does not "
                f"have{hint(name, resources)}"
            )

    fixed = {parameter: resources[name] for parameter, name in found.items()}
    if "config" in contract.reserved:
        fixed["config"] = node.config
    of_the_call = [name for name in contract.reserved if name not in fixed]
    fixed |= node.options
    required = frozenset(contract.reads)

    def inputs(columns: Batch | Group, call: Mapping[str, object]) -> dict[str, object]:
        keyword = dict(fixed)
        for name in contract.by_keyword:
            if name in required or name in columns:
                keyword[name] = columns[name]

        for name in of_the_call:
            keyword[name] = call[name]
        return keyword

    return inputs


@dataclass(frozen=True)
class Step:
    """A node to be called."""

    node: BoundNode
    fn: Callable[..., object]
    """The node's function in our form."""
    inputs: Inputs

    def __call__(self, batch: Batch, ctx: NodeContext) -> tuple[Batch, Measured]:
        """In the training loop: the batch with the node's columns, and the node's metrics. Raises
        NodeError.

        A failing node is retried up to its `retry_limit`; errors of a check or of the user's config
        are not failures of the node and pass through.
        """
        for retries_left in range(self.node.retry_limit, -1, -1):
            try:
                keyword = self.inputs(batch, {"batch": batch, "ctx": ctx})
                before = self._versions(keyword)
                output = self.fn(**keyword)
                break
            except (NodeError, TrustError, UserError):
                raise
            # the boundary to user code
            except (Exception, SystemExit, GeneratorExit, asyncio.CancelledError) as err:
                if not retries_left:
                    raise node_error(self.node, err) from err

        with self._fitting():
            if isinstance(output, Drop):
                raise output_error(
                    self.node, "returned Drop in the training loop, where no group can be dropped"
                )

            returned, measured = _measured(output, len(batch))
            if isinstance(returned, Batch):
                _check_unchanged(before, ())
                out = batch.merge(returned)
                self._check_finite(out, self.node.contract.writes)
                return out, measured

            columns = self._columns(returned)
            _check_unchanged(before, columns.values())
            out = batch.copy()
            for name, value in columns.items():
                out[name] = value
            self._check_finite(out, columns)
            return out, measured

    async def on_group(
        self, group: Group, ctx: NodeContext, plain_calls: PlainCalls, timeout_s: float
    ) -> Drop | None:
        """In the rollout loop: the group stores the node's columns and metrics. Raises NodeError.

        A user's function, and any sync one, may take `timeout_s` for each sample.
        """
        for retries_left in range(self.node.retry_limit, -1, -1):
            try:
                output, before = await self._call(
                    group, ctx, plain_calls, timeout_s * len(group), retries_left
                )
                break
            except (NodeError, UserError):
                raise
            except asyncio.CancelledError as err:
                task = asyncio.current_task()
                if task is None or task.cancelling() or is_ours(self.node.fn):
                    raise
                raise node_error(self.node, err) from err
            except BaseException as err:  # the boundary to user code
                if not retries_left:
                    raise node_error(self.node, err) from err

        if isinstance(output, Drop):
            return output

        with self._fitting():
            self._keep(group, output, before)
        return None

    async def _call(
        self,
        group: Group,
        ctx: NodeContext,
        plain_calls: PlainCalls,
        deadline_s: float,
        retries_left: int,
    ) -> tuple[object, Versions]:
        """(what the function returned, the versions of its arguments before)."""
        identity = (self.node.node_id, group.stream, retries_left)

        async def call_user(
            function: Callable[[], Awaitable[Any]], within_s: float, *more: object
        ) -> Any:
            return await run_async(function, within_s, plain_calls.turn, *identity, *more)

        call = {"group": group, "samples": group.samples, "ctx": replace(ctx, call_user=call_user)}
        if "batch" in self.node.contract.reserved:
            call["batch"] = group.batch()
        keyword = self.inputs(group, call)
        before = self._versions(keyword)

        work: partial[Any] = partial(self.fn, **keyword)
        try:
            if not is_async(self.fn):
                output = await plain_calls.run(work, deadline_s, *identity)
            elif is_ours(self.node.fn):  # waits for what has deadlines of its own
                output = await work()
            else:
                output = await run_async(work, deadline_s, plain_calls.turn, *identity)
        except DeadlinePassed as err:
            what = f"did not return within {deadline_s:g} s (reward.timeout_s for each sample){err}"
            raise output_error(self.node, what) from None

        return output, before

    def _keep(self, group: Group, output: object, before: Versions) -> None:
        returned, measured = _measured(output, len(group))
        if isinstance(returned, list) and returned and all(isinstance(s, Sample) for s in returned):
            group.set_samples(returned)
            returned = None

        if isinstance(returned, Batch):
            columns = _changed(group.batch(), returned)
        else:
            columns = self._columns(returned)

        _check_unchanged(before, columns.values())
        group.write(columns)
        self._check_finite(group.batch(), columns)
        group.measured.append(measured)

    def _versions(self, keyword: Mapping[str, object]) -> Versions:
        """Of the columns that a user's function gets; of none for an estimator, which may
        change its arguments."""
        if is_ours(self.node.fn) or self.node.node_role is NodeRole.ADVANTAGE:
            return {}

        found = {}
        for name, value in keyword.items():
            if isinstance(value, Tensor) and not value.is_inference():
                found[name] = (value, value._version)

        return found

    def _check_finite(self, batch: Batch, names: Iterable[str]) -> None:
        """Raises NodeError if a user's function wrote a number beyond float32 for a sample that has
        a score."""
        for name in () if is_ours(self.node.fn) else names:
            values = batch.flat(name)
            axis = batch.field(name).axis
            if not isinstance(values, Tensor) or not values.is_floating_point():
                continue

            rows = torch.arange(len(batch)) if axis is Axis.SAMPLE else batch.rows(axis)

            counts = batch.flat("valid")[rows]
            if axis is Axis.RESPONSE:
                counts = counts & (batch.flat("response_mask") > 0)

            wrong = ~(values.abs() <= LARGEST_NUMBER) & counts
            for place in wrong.nonzero()[:1, 0].tolist():
                uid = batch["uid"][int(rows[place])]
                value = float(values[place])
                raise output_error(
                    self.node, f"wrote {value} into the column '{name}' for sample {uid}"
                )

    def _columns(self, returned: object) -> dict[str, Written]:
        """The columns that the function returned."""
        columns = dict[str, Written]()
        for name, value in self._by_name(returned).items():
            if not isinstance(value, Tensor | np.ndarray | Sequence):
                raise ValueError(
                    f"column '{name}' is {type(value).__name__}, not a tensor, an array or a list"
                )
            columns[name] = value

        return columns

    def _by_name(self, returned: object) -> Mapping[str, object]:
        if returned is None:
            return {}
        if isinstance(returned, Mapping):
            return returned

        writes = self.node.contract.writes
        if writes == SCORE_FIELDS and not isinstance(returned, tuple):
            return dict.fromkeys(writes, returned)

        values: Sequence[object] = returned if isinstance(returned, tuple) else (returned,)
        if len(values) != len(writes):
            names = ", ".join(writes) or "(none)"
            raise ValueError(
                f"{len(values)} values for the fields {names}; return one for each, as a tuple"
            )

        return dict(zip(writes, values, strict=True))

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Reports errors inside as due to what the node returned."""
        try:
            yield
        except NodeError:
            raise
        except BadOutput as err:
            raise output_error(self.node, str(err)) from err
        except (ValueError, TypeError) as err:
            raise output_error(
                self.node, f"returned something that does not fit its batch: {err}"
            ) from err


def compile_steps(nodes: Sequence[BoundNode], resources: Mapping[str, object]) -> tuple[Step, ...]:
    """resources: engines and services by name, and `reduce`. Raises PipelineError if one is
    missing."""
    steps = []
    for node in nodes:
        fn = adapt(node.fn, node.contract.form)
        steps.append(Step(node, fn, compile_inputs(node, resources)))
    return tuple(steps)


def _measured(output: object, num_samples: int) -> tuple[object, Measured]:
    """(what the function returned without its metrics, these)."""
    if not isinstance(output, NodeOutput):
        return output, ({}, float(num_samples))

    weight = float(num_samples) if output.weight is None else output.weight

    return output.batch, (dict(output.metrics or {}), weight)


def _check_unchanged(before: Versions, returned: Iterable[object]) -> None:
    """Raises BadOutput if the function changed a column that it got, and does not return that."""
    for name, (tensor, version) in before.items():
        if tensor._version != version and all(value is not tensor for value in returned):
            raise BadOutput(
                f"changed its column '{name}' in place, which has no effect: return it and name it "
                "in writes, or change a clone"
            )


def _changed(before: Batch, after: Batch) -> dict[str, Written]:
    """The columns that a node added to its batch or replaced."""
    lengths = after.lengths("sequence")
    if len(before) != len(after) or not torch.equal(before.lengths("sequence"), lengths):
        raise ValueError(
            "it contains different samples than the group's; a node that generates responses "
            "returns a list of samples (distflow.data.sample.Sample)"
        )

    found = {}
    for name in after.names:
        value = after.flat(name)
        if name not in before or not _same(before.flat(name), value):
            found[name] = value

    return found


def _same(ours: Written, theirs: Written) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    return bool(ours == theirs)
