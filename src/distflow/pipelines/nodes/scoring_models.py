"""Nodes of models that score as engines of the run: one for each reward model or judge, and one
that adds their results to the scores of the reward functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import on_last_token
from distflow.config import Config
from distflow.config.derived_settings import algorithm_of
from distflow.config.keys.reward import on_error_of, scoring_models
from distflow.data.batch import Batch
from distflow.graph import SCORE_FIELDS, NodeOutput, NodeRole, Pipeline, node, node_factory
from distflow.graph.fields import register_field
from distflow.pipelines.nodes.reward_samples import num_needed
from distflow.runtime.error_limits import TooManyErrors
from distflow.runtime.judge_engine import Judge
from distflow.runtime.rollout_loop.group import rows_by_group
from distflow.training.engine import Collective
from distflow.training.torch_engine import RewardModelScorer
from distflow.user_values import finite_number

Answer = Mapping[str, Any]
"""A model's result for a response: `score` or `error`, and further entries."""


def score_by_models(pipeline: Pipeline, config: Config, after: Sequence[str]) -> None:
    """Add the nodes of all models. Models on different devices score concurrently, without waiting
    for each other."""
    for name, model in scoring_models(config.reward_model).items():
        column = register_field(
            _column(name), "object", "object", f"what the model '{name}' returned"
        ).name
        options = {"domains": model.domains} if model.domains else {}
        pipeline.add_node(
            f"score_by_{name}", ask_model, after, engine=name, writes=(column,), **options
        )

    if scoring_models(config.reward_model):
        pipeline.add_node("reward_model_score", add_model_scores, after)


def _column(name: str) -> str:
    return f"said_by_{name}"


@node(
    role=NodeRole.REWARD, reads=("prompts", "responses", "domain", "?ground_truth", "?extra_info")
)
def ask_model(
    batch: Batch, engine: RewardModelScorer | Judge, *, domains: Sequence[str] = ()
) -> list[dict[str, object]]:
    """The model's result for each response; empty for other domains if it is limited to some."""
    rows = [row for row, domain in enumerate(batch["domain"]) if not domains or domain in domains]
    # on every rank, even without rows
    said = dict(zip(rows, engine.score(batch.select(rows)), strict=True))
    return [said.get(row, {}) for row in range(len(batch))]


@node_factory
@node(role=NodeRole.REWARD)
def add_model_scores(config: Config) -> Callable[..., object]:
    """Add the scores of all models, times their weights, to those of the reward functions. A sample
    that a model did not score has a reward error, handled by `reward.on_error`, except that groups
    cannot be dropped here."""
    changed = ("scores", "valid", "reward_parts", "reward_errors", "reward_extra")
    columns = sorted(map(_column, scoring_models(config.reward_model)))
    reads = ("response_mask", "group_index", "domain", "?turn_index", "?token_level_scores")

    @node(reads=(*changed, *columns, *reads), writes=(*changed, *SCORE_FIELDS))
    def add(batch: Batch, reduce: Collective) -> NodeOutput:
        return _add_scores(batch, reduce, config)

    return add


def _add_scores(batch: Batch, reduce: Collective, config: Config) -> NodeOutput:
    models = scoring_models(config.reward_model)
    said: dict[str, Sequence[Answer]] = {name: batch[_column(name)] for name in models}
    scores = batch["scores"].clone()
    parts = [dict(each) for each in batch["reward_parts"]]
    extra = [dict(each) for each in batch["reward_extra"]]
    asked = [row for row, error in enumerate(batch["reward_errors"]) if error is None]

    failed = dict[int, str]()
    for row in range(len(batch)):
        answers = {name: each[row] for name, each in said.items()}
        extra[row] |= _entries(answers, "reason")
        if batch["reward_errors"][row] is not None:
            continue

        parts[row] |= _entries(answers, "score")
        try:
            scores[row] = _total(float(scores[row]), answers, models)
        except ValueError as error:
            failed[row] = str(error)

    counts = {"failed": float(len(failed)), "asked": float(len(asked))}
    _check_share(reduce.sum(counts), failed, config)
    found: dict[str, object] = {"reward_parts": parts, "reward_extra": extra}
    found |= _with_errors(batch, scores, failed, config)
    placed = _on_tokens(batch, scores, failed)
    found |= dict.fromkeys(SCORE_FIELDS, placed)

    return NodeOutput({**found, "scores": scores}, _counts(said, models))


def _entries(answers: Mapping[str, Answer], key: str) -> dict[str, Any]:
    """This entry of each model's answer that has it, by model."""
    return {name: answer[key] for name, answer in answers.items() if key in answer}


def _total(own: float, answers: Mapping[str, Answer], models: Mapping[str, Any]) -> float:
    """The score of a response. own: that of the reward functions. Raises ValueError if a model gave
    none, or the total is no finite number."""
    errors = _entries(answers, "error")
    if errors:
        raise ValueError("; ".join(f"{name}: {error}" for name, error in errors.items()))
    scores = _entries(answers, "score")
    added = math.fsum(models[name].weight * score for name, score in scores.items())
    return finite_number(own + added, "its score with those of the models is")


def _on_tokens(batch: Batch, scores: Tensor, failed: Mapping[int, str]) -> Tensor:
    """The scores on the tokens: `(bs, response_length)`. Turns keep their rewards."""
    if "turn_index" not in batch:
        return on_last_token(scores, batch["response_mask"])

    placed = on_last_token(scores - batch["scores"], batch["response_mask"])
    placed = placed + batch["token_level_scores"]
    rows = list(failed)  # have the score of `on_error`, or none
    placed[rows] = on_last_token(scores[rows], batch["response_mask"][rows])

    return placed


def _counts(said: Mapping[str, Sequence[Answer]], models: Mapping[str, Any]) -> dict[str, float]:
    counts = dict[str, float]()
    for name, answers in said.items():
        counts[f"reward/errors/{name}"] = float(sum("error" in each for each in answers))
        if not models[name].judge:
            counts[f"reward/cut/{name}"] = float(sum(bool(each.get("cut")) for each in answers))
    return counts


def _check_share(counts: Mapping[str, float], failed: Mapping[int, str], config: Config) -> None:
    """Raises TooManyErrors on every rank, or on none. failed: of this rank."""
    if counts["failed"] > config.reward.max_error_rate * counts["asked"]:
        if failed:
            first = f" The first here said: {next(iter(failed.values()))}"
        else:
            first = ""

        raise TooManyErrors(
            f"models did not score {counts['failed']:.0f} of {counts['asked']:.0f} samples of the "
            f"step, more than reward.max_error_rate={config.reward.max_error_rate:g} allows.{first}"
        )


def _with_errors(
    batch: Batch, scores: Tensor, failed: Mapping[int, str], config: Config
) -> dict[str, object]:
    """`valid` and `reward_errors`; if `reward.on_error` assigns a score to errors, it is written
    into `scores`. A group left with fewer scores than its estimator compares has none."""
    valid = batch["valid"].bool().clone()
    errors = list(batch["reward_errors"])
    for row, reason in failed.items():
        errors[row] = reason
        on_error = on_error_of(config.reward, batch["domain"][row])
        valid[row] = isinstance(on_error, float)
        if isinstance(on_error, float):
            scores[row] = on_error

    for rows in rows_by_group(batch).values():
        if len(rows) == 1 or failed.keys().isdisjoint(rows):
            continue

        algorithm = algorithm_of(config, batch["domain"][rows[0]])
        if int(valid[rows].sum()) >= num_needed(algorithm.adv_estimator):
            continue

        for row in rows:
            if valid[row]:
                valid[row] = False
                errors[row] = "a model scored too few samples of its group"

    return {"valid": valid, "reward_errors": errors}
