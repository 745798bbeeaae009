"""A node compiled for calling: everything fixed is closed over, a context passes the rest, and its
output is checked and stored. Training and rollout loops iterate over such steps."""

import asyncio
import inspect
from collections import UserDict
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.config import Config
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
from distflow.observe.writing.timing import REWARDS, Waits
from distflow.rewards.reward_results import RewardResult
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.runtime.checks_protocol import Updates
from distflow.runtime.resources import Resources
from distflow.runtime.reward_functions_as_nodes import adapt
from distflow.runtime.rollout_loop.group import Group, rows_by_group
from distflow.runtime.rollout_loop.user_calls import (
    DeadlinePassed,
    PlainCalls,
    deadline_paused,
    run_async,
)
from distflow.runtime.run_errors import BadOutput, NodeError, node_error, output_error
from distflow.scheduling.data_plan import minibatches
from distflow.training.engine import LossFn, TrainEngine
from distflow.user_values import LARGEST_NUMBER

Updated = Callable[[TrainEngine, Batch, dict[str, float], bool], None]
"""(engine, mini-batch, metrics, whether it was the first of the step): called after each optimizer
step."""

Watched = Callable[[TrainEngine, Batch, LossFn], LossFn]
"""(engine, mini-batch, loss function) → the loss function to call: that one, or one that records
its arguments."""

Versions = Mapping[str, tuple[Tensor, int]]
"""A column that a function gets, and how often it had been changed in place, by name."""

NodeState = dict[str, dict[str, Any]]
"""JSON values of each node, by its id; they persist across steps and are in every checkpoint."""


async def _no_user_calls(function: Callable[[], Awaitable[Any]], *identity: object) -> Any:
    raise AssertionError("only the rollout loop calls async functions of the user's")


@dataclass(frozen=True)
class NodeContext:
    """Passed to nodes that name `ctx`.

    step: the training step, from 0; in the rollout loop, the one in which the group was issued.
    state: the node's own JSON values; they persist across steps and are in every checkpoint. A node
    of the rollout loop has none if another worker generates, or trains. before_update: returns the
    loss function to call in an optimizer step, so that a step can be checked.
    after_update: must be called after each optimizer step of an engine, which it checks. group_ids:
    of the whole step, over all ranks, in order; they determine the mini-batches. Empty in the
    rollout loop. group: only in the rollout loop. validating: the group is of a validation set.
    router: the reward functions of `reward_fn`; None in the training loop, and if the pipeline
    starts none. call_user: awaits a user's async function with a deadline in seconds and separate
    random generators (`run_async`); further arguments identify the call.
    """

    config: Config
    step: int
    tokenizer: PreTrainedTokenizerBase
    state: MutableMapping[str, Any] = field(default_factory=dict)
    before_update: Watched = lambda engine, batch, loss: loss
    after_update: Updated = lambda engine, batch, metrics, first: None
    group_ids: Sequence[int] = ()
    group: Group | None = None
    validating: bool = False
    router: RewardRouter | None = None
    call_user: Callable[..., Awaitable[Any]] = _no_user_calls

    def minibatches(self, batch: Batch, num_prompts: int, epoch: int) -> Iterator[Batch]:
        """This rank's part of each mini-batch of one pass over the step, of `num_prompts` whole
        groups each.

        The division is over the groups of all ranks, so that mini-batches are the same for any
        number of ranks.
        """
        order = minibatches(
            len(self.group_ids),
            self.group_ids,
            num_prompts,
            self.config.trainer.seed,
            self.step,
            epoch,
        )
        rows = rows_by_group(batch)
        for places in order:
            yield batch.select(
                sorted(row for place in places for row in rows.get(self.group_ids[place], ()))
            )

    async def reward_fn(self, samples: Sequence[Sample] | Batch) -> list[RewardOutcome]:
        """Scores of the reward functions on samples; a batch of the group stands for all of its
        samples.

        Raises UserError if the pipeline starts no reward functions.
        """
        if self.router is None or self.group is None:
            raise UserError(
                "ctx.reward_fn has no reward functions: they run with the rollout loop of "
                "pipelines in which a node "
                "has a parameter `reward_fn`. Add it to your function, and call `await "
                "reward_fn(samples)`"
            )
        with deadline_paused():  # reward functions have their own deadlines
            return await self.router(self.group.samples if isinstance(samples, Batch) else samples)


async def score_samples(
    router: RewardRouter, waits: Waits, samples: Sequence[Sample]
) -> list[RewardOutcome]:
    """The function behind a node's `reward_fn`, which binds router and waits."""
    with waits("reward", "scores", on=REWARDS), deadline_paused():
        return await router(samples)


def episode_results(samples: Sequence[Sample]) -> list[RewardResult] | None:
    """The results of episodes that their workflow did not reject; None for samples that no workflow
    has scored."""
    results = [
        sample.outcome.reward_result
        for sample in samples
        if isinstance(sample.outcome, RewardOutcome)
    ]
    return results if results or any(sample.rejected for sample in samples) else None


@dataclass(frozen=True)
class Contexts:
    """Makes the contexts of one worker's nodes.

    updates: None for a worker that updates nothing. keeps: whether nodes of the rollout loop may
    keep state, i.e. whether this worker has all groups and checkpoints.
    """

    config: Config
    resources: Resources
    state: NodeState
    updates: Updates | None
    keeps: bool = True

    def for_training(self, step: int, group_ids: Sequence[int], node_id: str) -> NodeContext:
        assert self.updates is not None, "a worker that trains updates its engines"
        return NodeContext(
            self.config,
            step,
            self.resources.tokenizer,
            self.state.setdefault(node_id, {}),
            self.updates.before,
            partial(self.updates.after, step=step),
            group_ids,
        )

    def for_rollout(self, group: Group, node_id: str, validating: bool = False) -> NodeContext:
        return NodeContext(
            self.config,
            group.prompt_group.version,
            self.resources.tokenizer,
            self.state.setdefault(node_id, {})
            if self.keeps
            else _NoState(node_id, self.state.get(node_id, {})),
            group=group,
            validating=validating,
            router=self.resources.reward_fn,
        )


class _NoState(UserDict[str, Any]):
    """Raises UserError on writes: each worker would have separate state, which no checkpoint would
    hold in full."""

    def __init__(self, node_id: str, restored: dict[str, Any]) -> None:
        self._node_id = node_id
        super().__init__(restored)

    def __setitem__(self, name: str, value: object) -> None:
        raise UserError(
            f"node '{self._node_id}' keeps ctx.state['{name}'] on one of several workers: the "
            "others do not have "
            "it, and no checkpoint contains it. Use a node of the training loop, or a single worker"
        )


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
        found["reduce"] = "dp_group" if node.node_type is NodeType.BARRIER_SYNC else "reduce"
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
        keyword = {
            name: columns[name]
            for name in contract.by_keyword
            if name in required or name in columns
        }
        return {**keyword, **{name: call[name] for name in of_the_call}, **fixed}

    return inputs


@dataclass(frozen=True)
class Step:
    """fn: the node's function in our form. inputs: its arguments."""

    node: BoundNode
    fn: Callable[..., object]
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
            columns, measured = self._read(output, len(batch), before)
            out = batch.merge(columns) if isinstance(columns, Batch) else batch.copy()
            for name, value in () if isinstance(columns, Batch) else columns.items():
                out[name] = value
            self._check_finite(
                out, self.node.contract.writes if isinstance(columns, Batch) else columns
            )
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
        with self._fitting():
            return self._keep(group, output, before)

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
        try:
            if not is_async(self.fn):
                return await plain_calls.run(
                    partial(self.fn, **keyword), deadline_s, *identity
                ), before
            # waits for engine and reward functions, which have their own deadlines
            if is_ours(self.node.fn):
                return await self.fn(**keyword), before
            work = partial(self.fn, **keyword)
            return await run_async(work, deadline_s, plain_calls.turn, *identity), before
        except DeadlinePassed as err:
            what = f"did not return within {deadline_s:g} s (reward.timeout_s for each sample){err}"
            raise output_error(self.node, what) from None

    def _keep(self, group: Group, output: object, before: Versions) -> Drop | None:
        if isinstance(output, Drop):
            return output
        made = output.batch if isinstance(output, NodeOutput) else output
        if isinstance(made, list) and made and all(isinstance(sample, Sample) for sample in made):
            group.set_samples(made)
            output = (
                NodeOutput(None, output.metrics, output.weight)
                if isinstance(output, NodeOutput)
                else None
            )
        columns, measured = self._read(output, len(group), before)
        written = _changed(group.batch(), columns) if isinstance(columns, Batch) else columns
        group.write(written)
        self._check_finite(group.batch(), written)
        group.measured.append(measured)
        return None

    def _versions(self, keyword: Mapping[str, object]) -> Versions:
        """Of the columns that a user's function gets; of none for an estimator, which may
        change its arguments."""
        if is_ours(self.node.fn) or self.node.node_role is NodeRole.ADVANTAGE:
            return {}
        return {
            name: (x, x._version)
            for name, x in keyword.items()
            if isinstance(x, Tensor) and not x.is_inference()
        }

    def _check_finite(self, batch: Batch, names: Iterable[str]) -> None:
        """Raises NodeError if a user's function wrote a number beyond float32 for a sample that has
        a score."""
        for name in () if is_ours(self.node.fn) else names:
            values = batch.flat(name)
            axis = batch.field(name).axis
            if not isinstance(values, Tensor) or not values.is_floating_point():
                continue
            finite = values.abs() <= LARGEST_NUMBER
            rows = torch.arange(len(batch)) if axis is Axis.SAMPLE else batch.rows(axis)
            counts = batch.flat("valid")[rows] & (
                batch.flat("response_mask") > 0 if axis is Axis.RESPONSE else True
            )
            for place in (~finite & counts).nonzero()[:1, 0].tolist():
                uid = batch["uid"][int(rows[place])]
                value = float(values[place])
                raise output_error(
                    self.node, f"wrote {value} into the column '{name}' for sample {uid}"
                )

    def _read(
        self, output: object, num_samples: int, before: Versions
    ) -> tuple[Batch | Mapping[str, Written], Measured]:
        """(columns, metrics) of what the function returned. Raises BadOutput if it changed a column
        that it got, and does not return that."""
        measured: Measured = ({}, float(num_samples))
        if isinstance(output, NodeOutput):
            weight = float(num_samples) if output.weight is None else output.weight
            measured = (dict(output.metrics or {}), weight)
            output = output.batch
        if isinstance(output, Drop):
            raise output_error(
                self.node, "returned Drop in the training loop, where no group can be dropped"
            )
        if inspect.iscoroutine(output):
            output.close()
            raise BadOutput(
                "returned a coroutine: write `def`, not `async def`, or await what the function "
                "calls"
            )
        columns = dict[str, Written]()
        named = {} if isinstance(output, Batch) or output is None else output
        for name, value in (named if isinstance(named, Mapping) else self._by_name(named)).items():
            if not isinstance(value, Tensor | np.ndarray | Sequence):
                raise ValueError(
                    f"column '{name}' is {type(value).__name__}, not a tensor, an array or a list"
                )
            columns[name] = value
        for name, (tensor, version) in before.items():
            if tensor._version != version and all(
                value is not tensor for value in columns.values()
            ):
                what = f"changed its column '{name}' in place, which has no effect"
                raise BadOutput(f"{what}: return it and name it in writes, or change a clone")
        return output if isinstance(output, Batch) else columns, measured

    def _by_name(self, output: object) -> dict[str, object]:
        writes = self.node.contract.writes
        if writes == SCORE_FIELDS and not isinstance(output, tuple):
            return dict.fromkeys(writes, output)
        values: Sequence[object] = output if isinstance(output, tuple) else (output,)
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
    return tuple(
        Step(node, adapt(node.fn, node.contract.form), compile_inputs(node, resources))
        for node in nodes
    )


def _changed(before: Batch, after: Batch) -> dict[str, Written]:
    """The columns that a node added to its batch or replaced."""
    if len(before) != len(after) or not bool(
        (before.lengths("sequence") == after.lengths("sequence")).all()
    ):
        raise ValueError(
            "it contains different samples than the group's; a node that generates responses "
            "returns a list of samples "
            "(distflow.data.sample.Sample)"
        )
    return {
        name: after.flat(name)
        for name in after.names
        if name not in before or not _same(before, after, name)
    }


def _same(one: Batch, other: Batch, name: str) -> bool:
    ours = one.flat(name)
    theirs = other.flat(name)
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
