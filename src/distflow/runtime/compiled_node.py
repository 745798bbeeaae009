"""A node compiled with everything that does not change: a training or rollout loop iterates over such steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import Batch, Written
from distflow.data.sample import Sample
from distflow.errors import TrustError, UserError
from distflow.graph import SCORE_FIELDS, BoundNode, Drop, Inputs, NodeOutput, compile_inputs
from distflow.graph.fields import is_async
from distflow.observe.metrics import Measured
from distflow.runtime.context import NodeContext
from distflow.runtime.errors import BadOutput, NodeError, is_ours, node_error, output_error
from distflow.runtime.prompt_group import Group
from distflow.runtime.user_calls.async_calls import run_async
from distflow.runtime.user_calls.reward_adapters import adapt
from distflow.runtime.user_calls.sync_calls import DeadlinePassed, PlainCalls


@dataclass(frozen=True)
class Step:
    """fn: the node's function in our own form. inputs: its arguments."""

    node: BoundNode
    fn: Callable[..., object]
    inputs: Inputs

    def __call__(self, batch: Batch, ctx: NodeContext) -> tuple[Batch, Measured]:
        """In the training loop: the batch with the node's columns, and its metrics. Raises NodeError.

        A node that fails is retried up to its `retry_limit`; errors of a check or of the user's config are no failure
        of the node and pass through.
        """
        for retries_left in range(self.node.retry_limit, -1, -1):
            try:
                positional, keyword = self.inputs(batch, {"batch": batch, "ctx": ctx})
                output = self.fn(*positional, **keyword)
                break
            except (NodeError, TrustError, UserError):
                raise
            except Exception as err:  # the border to user code
                if not retries_left:
                    raise self._error(err) from err
        with self._fitting():
            columns, measured = self._read(output, len(batch))
            return _merged(batch, columns), measured

    async def on_group(self, group: Group, ctx: NodeContext, plain_calls: PlainCalls, timeout_s: float) -> Drop | None:
        """In the rollout loop: the group stores the node's columns and metrics. Raises NodeError.

        A function of the user, and any sync one, may take `timeout_s` for each sample.
        """
        for retries_left in range(self.node.retry_limit, -1, -1):
            try:
                output = await self._call(group, ctx, plain_calls, timeout_s * len(group), retries_left)
                break
            except (NodeError, UserError):
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as err:  # the border to user code
                if not retries_left:
                    raise self._error(err) from err
        with self._fitting():
            return self._keep(group, output)

    async def _call(
        self, group: Group, ctx: NodeContext, plain_calls: PlainCalls, deadline_s: float, retries_left: int
    ) -> object:
        call = {"group": group, "samples": group.samples, "ctx": ctx}
        if "batch" in self.node.contract.reserved:
            call["batch"] = group.batch()
        positional, keyword = self.inputs(group, call)
        identity = (self.node.node_id, group.stream, retries_left)
        try:
            if not is_async(self.fn):
                return await plain_calls.run(partial(self.fn, *positional, **keyword), deadline_s, *identity)
            if is_ours(self.node):  # waits for engine and reward functions, which end by themselves
                return await self.fn(*positional, **keyword)
            work = partial(self.fn, *positional, **keyword)
            return await run_async(work, deadline_s, plain_calls.turn, *identity)
        except DeadlinePassed as err:
            what = f"did not return within {deadline_s:g} s (reward.timeout_s for each sample){err}"
            raise output_error(self.node, what) from None

    def _keep(self, group: Group, output: object) -> Drop | None:
        if isinstance(output, Drop):
            return output
        made = output.batch if isinstance(output, NodeOutput) else output
        if isinstance(made, list) and made and all(isinstance(sample, Sample) for sample in made):
            group.set_samples(made)
            output = NodeOutput(None, output.metrics, output.weight) if isinstance(output, NodeOutput) else None
        columns, measured = self._read(output, len(group))
        group.write(_changed(group.batch(), columns) if isinstance(columns, Batch) else columns)
        group.measured.append(measured)
        return None

    def _read(self, output: object, num_samples: int) -> tuple[Batch | Mapping[str, Written], Measured]:
        """(columns, metrics) of what the function returned."""
        measured: Measured = ({}, float(num_samples))
        if isinstance(output, NodeOutput):
            weight = float(num_samples) if output.weight is None else output.weight
            measured, output = (dict(output.metrics or {}), weight), output.batch
        if output is None:
            return {}, measured
        if isinstance(output, Batch):
            return output, measured
        return _written(output if isinstance(output, Mapping) else self._by_name(output)), measured

    def _by_name(self, output: object) -> dict[str, object]:
        writes = self.node.contract.writes
        if writes == SCORE_FIELDS and not isinstance(output, tuple):
            return dict.fromkeys(writes, output)
        values: Sequence[object] = output if isinstance(output, tuple) else (output,)
        if len(values) != len(writes):
            raise ValueError(f"{len(values)} values for the fields {', '.join(writes) or '(none)'}")
        return dict(zip(writes, values, strict=True))

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Errors inside are due to what the node returned."""
        try:
            yield
        except (ValueError, TypeError) as err:
            raise output_error(self.node, f"returned something that does not fit its batch: {err}") from err

    def _error(self, err: BaseException) -> NodeError:
        return output_error(self.node, str(err)) if isinstance(err, BadOutput) else node_error(self.node, err)


def compile_steps(nodes: Sequence[BoundNode], resources: Mapping[str, object]) -> tuple[Step, ...]:
    """resources: engines and services by name, and `reduce`. Raises PipelineError if one is missing."""
    return tuple(Step(node, adapt(node.fn, node.contract.form), compile_inputs(node, resources)) for node in nodes)


def _written(columns: Mapping[str, object]) -> dict[str, Written]:
    """Raises ValueError for a value that cannot be a column."""
    found: dict[str, Written] = {}
    for name, value in columns.items():
        if not isinstance(value, Tensor | np.ndarray | Sequence):
            raise ValueError(f"column '{name}' is {type(value).__name__}, not a tensor, an array or a list")
        found[name] = value
    return found


def _merged(batch: Batch, columns: Batch | Mapping[str, Written]) -> Batch:
    if isinstance(columns, Batch):
        return batch.merge(columns)
    out = batch.only(batch.names)
    for name, value in columns.items():
        out[name] = value
    return out


def _changed(before: Batch, after: Batch) -> dict[str, Written]:
    """The columns that a node added to its batch or replaced."""
    if len(before) != len(after) or not bool((before.lengths("sequence") == after.lengths("sequence")).all()):
        raise ValueError(
            "it is over other samples than the group's; a node that makes responses returns a list of samples "
            "(distflow.data.sample.Sample)"
        )
    return {name: after.flat(name) for name in after.names if name not in before or not _same(before, after, name)}


def _same(one: Batch, other: Batch, name: str) -> bool:
    ours, theirs = one.flat(name), other.flat(name)
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
