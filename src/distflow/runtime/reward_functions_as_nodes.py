"""Adapters from reward functions with the signatures of other systems to node functions: one for
each form."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from distflow.data.batch import Batch
from distflow.graph import SCORE_FIELDS, Form, NodeOutput
from distflow.graph.fields import Axis
from distflow.import_target import is_async
from distflow.rewards.reward_results import own_reward_result, read_score
from distflow.runtime.run_errors import BadOutput

_DERIVED = ("input_ids", "attention_mask", "loss_mask", "index", "data_source")


def adapt(fn: Callable[..., object], form: Form) -> Callable[..., object]:
    """A function to be called as its contract says: with columns, or with `batch` and `config`."""
    if form is Form.SAMPLE_REWARD:
        if is_async(fn):
            return partial(_score_each_async, fn)
        return partial(_score_each, fn)
    if form is Form.BATCH_REWARD:
        if is_async(fn):
            return partial(_score_batch_async, fn)
        return partial(_score_batch, fn)

    return fn


def _score_each(fn: Callable[..., object], **columns: Any) -> dict[str, list[float]]:
    """`compute_score(data_source, solution_str, ground_truth[, extra_info])`: one number, or a dict
    with `score` and, if that is not the accuracy of the response, `acc`."""
    return _columns(fn(**call) for call in _calls(**columns))


async def _score_each_async(
    fn: Callable[..., Awaitable[object]], **columns: Any
) -> dict[str, list[float]]:
    return _columns([await fn(**call) for call in _calls(**columns)])


def _calls(
    data_source: list[str],
    responses: list[str],
    ground_truth: list[object],
    extra_info: list[object] | None = None,
    **options: object,
) -> Iterator[dict[str, object]]:
    for i, text in enumerate(responses):
        call = {
            "data_source": data_source[i],
            "solution_str": text,
            "ground_truth": ground_truth[i],
        }
        if extra_info is not None:
            call["extra_info"] = extra_info[i]
        yield call | options


def _columns(results: Iterable[object]) -> dict[str, list[float]]:
    scores = list[float]()
    accuracies = list[float]()
    for i, result in enumerate(results):
        try:
            score = read_score(result)
        except ValueError as err:
            raise BadOutput(f"was asked to score sample {i} of its group: {err}") from None
        scores.append(score.value)
        accuracies.append(own_reward_result(score))

    return {"scores": scores, "acc": accuracies}


def _score_batch(
    fn: Callable[..., object], batch: Batch, config: object, **options: object
) -> NodeOutput:
    """`compute_custom_reward(batch, config, **kwargs)`, called by keyword with a mapping of all
    columns.

    Scores with the attention mask's shape hold one score per sample, anywhere in the row.
    """
    columns = _all_columns(batch)
    return _written(fn(batch=dict(columns), config=config, **options), batch, columns)


async def _score_batch_async(
    fn: Callable[..., Awaitable[object]], batch: Batch, config: object, **options: object
) -> NodeOutput:
    columns = _all_columns(batch)
    return _written(await fn(batch=dict(columns), config=config, **options), batch, columns)


def _all_columns(batch: Batch) -> dict[str, object]:
    return {name: batch[name] for name in (*batch.names, *_DERIVED)}


def _written(output: object, batch: Batch, before: Mapping[str, object]) -> NodeOutput:
    """The columns that the function added or replaced. before: the columns that it was called
    with."""
    returned = output if isinstance(output, NodeOutput) else NodeOutput(output)

    columns = returned.batch
    if isinstance(columns, Batch):
        columns = {name: columns[name] for name in columns.names}
    if not isinstance(columns, Mapping):
        raise BadOutput(f"returned {type(columns).__name__}, not its batch")

    written = {name: value for name, value in columns.items() if value is not before.get(name)}
    wide = batch.mask(Axis.SEQUENCE).shape
    found = [written.get(name) for name in SCORE_FIELDS]

    sums = [
        value.double().sum(-1)
        for value in found
        if isinstance(value, Tensor) and value.shape == wide
    ]
    if len(sums) == len(SCORE_FIELDS):
        if not sums[0].equal(sums[1]):
            raise BadOutput(
                "returned token_level_rewards other than token_level_scores; return one score per "
                "sample"
            )

        for name in SCORE_FIELDS:
            del written[name]
        written["scores"] = sums[0]

    return replace(returned, batch=written)
