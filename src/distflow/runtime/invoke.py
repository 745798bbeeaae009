"""Calls a node: hands it what its signature names, and merges what it returns into the batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.graph import SCORE_FIELDS, BoundNode, NodeOutput
from distflow.graph.contract import Form
from distflow.graph.fields import Axis
from distflow.rewards.functions import read_score
from distflow.runtime.blame import output_error
from distflow.runtime.context import NodeContext
from distflow.runtime.plain_calls import PlainCalls
from distflow.training.collective import Collective


def call_node(node: BoundNode, batch: Batch, engines: Mapping[str, Any], ctx: NodeContext, reduce: Collective) -> Any:
    """Call the node's function; a coroutine comes back for `async def` functions."""
    contract = node.contract
    if contract.form is Form.SAMPLE_REWARD:
        return _score_each(node, batch)
    if contract.form is Form.BATCH_CTX:
        return node.fn(batch, ctx)
    if contract.form is Form.BATCH_REWARD:
        return node.fn(batch=_as_mapping(batch), config=node.config, **node.options)
    reserved = {"batch": batch, "ctx": ctx, "config": node.config, "reduce": reduce}
    return node.fn(
        *(_present(batch, name) for name in contract.by_position),
        **{name: batch[name] for name in contract.by_keyword if name in contract.reads or name in batch},
        **{name: engines[name] for name in contract.engines},
        **{name: reserved[name] for name in contract.reserved},
        **node.options,
    )


def _present(batch: Batch, name: str) -> Any:
    if name not in batch:
        return None
    return batch[name]


async def run_node(
    node: BoundNode,
    batch: Batch,
    engines: Mapping[str, Any],
    ctx: NodeContext,
    reduce: Collective,
    plain_calls: PlainCalls,
    deadline_s: float,
) -> Any:
    """Call an experience-plane node: awaited where it is async, else in a thread with a deadline."""
    if node.contract.is_async:
        return await call_node(node, batch, engines, ctx, reduce)
    try:
        return await plain_calls.run(lambda: call_node(node, batch, engines, ctx, reduce), deadline_s)
    except TimeoutError:
        raise output_error(node, f"did not return within {deadline_s:g} s (reward.timeout_s for each sample)") from None


def merge_output(node: BoundNode, batch: Batch, output: Any) -> tuple[Batch, dict[str, float]]:
    """The batch with what the node wrote, and the node's metrics. Raises NodeError for an output of another shape."""
    metrics: dict[str, float] = {}
    if isinstance(output, NodeOutput):
        metrics = dict(output.metrics or {})
        output = output.batch
    try:
        return _merged(node, batch, output), metrics
    except (ValueError, TypeError) as err:
        raise output_error(node, f"returned something that does not fit its batch: {err}") from err


def _merged(node: BoundNode, batch: Batch, output: Any) -> Batch:
    if output is None:
        return batch
    if isinstance(output, Batch):
        return _merge_batch(batch, output)
    written = dict(output) if isinstance(output, Mapping) else _by_name(node, output)
    out = batch.only(batch.names)
    for name, value in written.items():
        if node.contract.form is Form.BATCH_REWARD and name in ("attention_mask", "input_ids"):
            continue
        out[name] = _last_token_scores(out, name, value) if node.contract.form is Form.BATCH_REWARD else value
    return out


def _merge_batch(batch: Batch, output: Batch) -> Batch:
    """An entry node makes the group's samples: its batch replaces the prompts that it got."""
    same = len(batch) == len(output) and bool((batch.lengths("sequence") == output.lengths("sequence")).all())
    return batch.merge(output) if same else output


def _by_name(node: BoundNode, output: Any) -> dict[str, Any]:
    writes = node.contract.writes
    if writes == SCORE_FIELDS and not isinstance(output, tuple):
        return dict.fromkeys(SCORE_FIELDS, output)
    values = output if isinstance(output, tuple) else (output,)
    if len(values) != len(writes):
        raise ValueError(f"{len(values)} values for the fields {', '.join(writes) or '(none)'}")
    return dict(zip(writes, values, strict=True))


def _score_each(node: BoundNode, batch: Batch) -> dict[str, Any]:
    """The per-sample reward signature: one number (or a dict with `score`) a sample."""
    wants_extra = "extra_info" in node.contract.optional
    scores = []
    for i in range(len(batch)):
        arguments = {
            "data_source": batch["domain"][i],
            "solution_str": batch["responses"][i],
            "ground_truth": batch["ground_truth"][i],
            **({"extra_info": batch["extra_info"][i]} if wants_extra else {}),
            **node.options,
        }
        answer = node.fn(**arguments)
        try:
            scores.append(read_score(answer)[0])
        except ValueError as err:
            raise output_error(node, f"was asked to score sample {batch['uid'][i]}: {err}") from None
    rewards = scores_on_last_token(batch, scores)
    return {"token_level_scores": rewards, "token_level_rewards": rewards}


def scores_on_last_token(batch: Batch, scores: list[float]) -> Tensor:
    """One score a sample, put on the last response token that the policy made: `(bs, response_length)`.

    Not on a tool's or environment's token behind it: estimators read rewards of the policy's tokens only.
    """
    mask = batch["response_mask"]
    rewards = torch.zeros_like(mask)
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask > 0, positions, -1).amax(dim=1) if mask.shape[1] else torch.full((len(batch),), -1)
    for row, (score, position) in enumerate(zip(scores, last.tolist(), strict=True)):
        if position >= 0:
            rewards[row, position] = score
    return rewards


def _last_token_scores(batch: Batch, name: str, value: Any) -> Any:
    """Scores of the attention mask's shape are one score a sample, wherever in the row it was put."""
    wide = tuple(batch.mask(Axis.SEQUENCE).shape)
    if name.startswith("token_level_") and isinstance(value, Tensor) and tuple(value.shape) == wide:
        return scores_on_last_token(batch, value.sum(-1).tolist())
    return value


def _as_mapping(batch: Batch) -> dict[str, Any]:
    derived = {name: batch[name] for name in ("input_ids", "attention_mask", "loss_mask", "index", "data_source")}
    return {**batch.to_mapping(), **derived}
