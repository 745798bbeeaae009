"""Nodes of models that score as engines of the run: one for each reward model or judge, and one
that adds their results to the scores of the reward functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.advantages.group_estimator_base import on_last_token
from distflow.config import Config
from distflow.config.derived_settings import algorithm_of
from distflow.config.keys.reward import on_error_of, scoring_models
from distflow.data.batch import Batch
from distflow.graph import SCORE_FIELDS, NodeOutput, NodeRole, Pipeline, node, node_factory
from distflow.graph.fields import register_field
from distflow.pipelines.nodes.rollout_reward_filter import num_needed
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
    models = scoring_models(config.reward_model)
    changed = ("scores", "valid", "reward_parts", "reward_errors", "reward_extra")
    reads = {"response_mask", *changed, *map(_column, models)}
    writes = (*changed, *SCORE_FIELDS)

    @node(
        reads=(*sorted(reads), "group_index", "domain", "?turn_index", "?token_level_scores"),
        writes=writes,
    )
    def add(batch: Batch, reduce: Collective) -> NodeOutput:
        said = {name: batch[_column(name)] for name in models}
        unscored = [error is None for error in batch["reward_errors"]]
        scores = batch["scores"].clone()
        failed = _failed(said, unscored)
        for row in (row for row in range(len(batch)) if unscored[row] and row not in failed):
            of_models = math.fsum(
                model.weight * said[name][row].get("score", 0.0) for name, model in models.items()
            )
            try:
                scores[row] = finite_number(
                    float(scores[row]) + of_models, "its score with those of the models is"
                )
            except ValueError as error:
                failed[row] = str(error)
        _check_share(
            reduce.sum({"failed": float(len(failed)), "asked": float(sum(unscored))}),
            failed,
            config,
        )
        parts = [dict(each) for each in batch["reward_parts"]]
        for row in (row for row in range(len(batch)) if unscored[row]):
            parts[row] |= {
                name: answers[row]["score"]
                for name, answers in said.items()
                if "score" in answers[row]
            }
        extra = [dict(each) for each in batch["reward_extra"]]
        for row, name in product(range(len(batch)), said):
            extra[row] |= {name: said[name][row]["reason"]} if "reason" in said[name][row] else {}
        found = {"scores": scores, "reward_parts": parts, "reward_extra": extra}
        found |= _with_errors(batch, scores, failed, config)
        placed = on_last_token(scores, batch["response_mask"])
        if "turn_index" in batch:  # turns keep their rewards
            added = on_last_token(scores - batch["scores"], batch["response_mask"])
            # has the score of `on_error`, or none
            alone = torch.tensor([row in failed for row in range(len(batch))])
            placed = torch.where(alone[:, None], placed, batch["token_level_scores"] + added)
        found |= dict.fromkeys(SCORE_FIELDS, placed)
        counts = dict[str, float]()
        for name, model in models.items():
            counts[f"reward/errors/{name}"] = float(sum("error" in each for each in said[name]))
            if not model.judge:
                counts[f"reward/cut/{name}"] = float(
                    sum(bool(each.get("cut")) for each in said[name])
                )
        return NodeOutput(found, counts)

    return add


def _failed(said: Mapping[str, Sequence[Answer]], asked: Sequence[bool]) -> dict[int, str]:
    """For rows in `asked` without a score: the reason, by row."""
    failed = dict[int, str]()
    for name, answers in said.items():
        for row in (row for row, answer in enumerate(answers) if asked[row] and "error" in answer):
            failed[row] = "; ".join(
                filter(None, [failed.get(row), f"{name}: {answers[row]['error']}"])
            )
    return failed


def _check_share(counts: Mapping[str, float], failed: Mapping[int, str], config: Config) -> None:
    """Raises TooManyErrors on every rank, or on none. failed: of this rank."""
    if counts["failed"] > config.reward.max_error_rate * counts["asked"]:
        first = f" The first here said: {next(iter(failed.values()))}" if failed else ""
        raise TooManyErrors(
            f"models did not score {counts['failed']:.0f} of {counts['asked']:.0f} samples of the "
            "step, more than "
            f"reward.max_error_rate={config.reward.max_error_rate:g} allows.{first}"
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
        few = int(valid[rows].sum()) < num_needed(
            algorithm_of(config, batch["domain"][rows[0]]).adv_estimator
        )
        if few and len(rows) > 1 and not failed.keys().isdisjoint(rows):
            for row in (row for row in rows if valid[row]):
                valid[row] = False
                errors[row] = "a model scored too few samples of its group"
    return {"valid": valid, "reward_errors": errors}
