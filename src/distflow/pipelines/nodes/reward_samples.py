"""Nodes that score a group's samples, and drop groups with too few scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.algorithms.group_filter import TOO_FEW_SCORES
from distflow.builtin_names import ESTIMATORS
from distflow.config import Config
from distflow.config.derived_settings import algorithm_of
from distflow.config.keys.reward import OnError, on_error_of
from distflow.data.batch import Written
from distflow.data.sample import ENV_ERROR, Sample
from distflow.graph import Drop, NodeRole, node, node_factory
from distflow.pipelines.nodes.sample_responses import generate
from distflow.pipelines.nodes.turn_rewards import TURN_FIELDS, place_on_turns
from distflow.rewards.reward_results import Score
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.rollout.engine import RolloutEngine
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group import Group

REJECTED = "rejected"
SCORED_FIELDS = ("scores", "acc", "valid", "reward_parts", "reward_extra", "reward_errors")
EPISODE_FIELDS = (*SCORED_FIELDS, *TURN_FIELDS)
NO_DOMAINS: Mapping[str, tuple[int, OnError]] = MappingProxyType({})
_NO_OUTCOME = RewardOutcome(Score(0.0))
"""The outcome of a rejected episode."""


@node_factory
@node(role=NodeRole.REWARD, writes=SCORED_FIELDS)
def compute_reward(config: Config) -> Callable[..., object]:
    """Score each sample as its group completes, with the reward functions of its domain.

    An estimator that compares samples needs two scores; a group with fewer is dropped. So is one
    with any reward error if `reward.on_error` is drop.
    """
    return partial(reward_samples, **_scoring(config))


@node_factory
@node(role=NodeRole.REWARD, writes=EPISODE_FIELDS)
def take_scores(config: Config) -> Callable[..., object]:
    """The scores that a workflow gave its episodes, by the rules of `compute_reward`."""
    return partial(reward_episodes, **_scoring(config))


def _scoring(config: Config) -> dict[str, Any]:
    """How reward errors count: options of the reward nodes."""
    own = dict[str, tuple[int, OnError]]()
    for name in {**config.reward.domains, **config.algorithm.domains}:
        needed = num_needed(algorithm_of(config, name).adv_estimator)
        own[name] = (needed, on_error_of(config.reward, name))
    needed = num_needed(config.algorithm.adv_estimator)
    return {"min_valid": needed, "on_error": config.reward.on_error, "domains": own}


def num_needed(adv_estimator: str) -> int:
    """How many samples with a score a group needs."""
    estimator = ESTIMATORS.get(adv_estimator)
    return 2 if estimator and estimator.needs_group else 0


@node(
    writes=SCORED_FIELDS,
    role=NodeRole.REWARD,
    scope="group",
    reads=("responses", "domain", "ground_truth"),
)
async def reward_samples(
    samples: Sequence[Sample],
    reward_fn: RewardRouter,
    ctx: NodeContext,
    *,
    min_valid: int,
    on_error: OnError = "mask",
    domains: Mapping[str, tuple[int, OnError]] = NO_DOMAINS,
) -> dict[str, list[object]] | Drop:
    """A sample with a reward error is invalid (never a 0), or has the score that `on_error`
    assigns.

    domains: `min_valid` and `on_error` by domain, where they may differ.
    """
    min_valid, on_error = domains.get(samples[0].domain, (min_valid, on_error))
    return _scored(await reward_fn(samples), ctx.validating, min_valid, on_error)


@node(writes=EPISODE_FIELDS, role=NodeRole.REWARD, scope="group", reads=("responses", "domain"))
async def reward_episodes(
    samples: Sequence[Sample],
    ctx: NodeContext,
    *,
    min_valid: int,
    on_error: OnError = "mask",
    domains: Mapping[str, tuple[int, OnError]] = NO_DOMAINS,
) -> Mapping[str, Written] | Drop:
    """As `reward_samples`, for episodes. One that its workflow rejected is invalid, without an
    error; a group with too few left is dropped as rejected, and another starts."""
    min_valid, on_error = domains.get(samples[0].domain, (min_valid, on_error))
    outcomes = list[RewardOutcome]()
    for sample in samples:
        has_outcome = isinstance(sample.outcome, RewardOutcome)
        outcomes.append(sample.outcome if has_outcome else _NO_OUTCOME)  # type: ignore[arg-type]

    num_rejected = sum(sample.rejected for sample in samples)
    if num_rejected and not ctx.validating and len(samples) - num_rejected < max(min_valid, 1):
        return Drop(REJECTED)

    needed = min_valid + num_rejected  # rejected ones count as scored there
    columns = _scored(outcomes, ctx.validating, needed, on_error)
    if isinstance(columns, Drop):
        is_env = any(sample.finish_reason == ENV_ERROR for sample in samples)
        if is_env:
            return replace(columns, reason=ENV_ERROR)
        return columns

    for number, sample in enumerate(samples):
        if sample.rejected:
            columns["valid"][number] = False

    return {**columns, **place_on_turns(samples, columns["scores"])}


def _scored(
    outcomes: Sequence[RewardOutcome], validating: bool, min_valid: int, on_error: OnError
) -> dict[str, list[Any]] | Drop:
    """The columns `SCORED_FIELDS`. Validation never drops a group, nor assigns a score to an
    error."""
    results = [outcome.reward_result for outcome in outcomes]
    failed = [str(result) for result in results if not isinstance(result, Score)]

    if isinstance(on_error, float) and not validating:
        substitute = on_error
    else:
        substitute = None

    if failed and substitute is None and not validating:
        too_few = len(outcomes) > 1 and len(outcomes) - len(failed) < min_valid
        if too_few or on_error == "drop":
            return Drop(TOO_FEW_SCORES, failed[0])

    columns: dict[str, list[Any]] = {name: [] for name in SCORED_FIELDS}
    for outcome, result in zip(outcomes, results, strict=True):
        columns["acc"].append(outcome.accuracy)
        columns["reward_parts"].append(outcome.scores())

        if isinstance(result, Score):
            columns["scores"].append(result.value)
            columns["valid"].append(True)
            columns["reward_extra"].append(result.extra)
            columns["reward_errors"].append(None)
        else:
            columns["scores"].append(substitute or 0.0)
            columns["valid"].append(substitute is not None)
            columns["reward_extra"].append(outcome.remarks())
            columns["reward_errors"].append(str(result))

    return columns


@node(writes="reward_baselines", scope="group", reads=("responses",))
async def greedy_baseline(
    group: Group,
    rollout: RolloutEngine,
    reward_fn: RewardRouter,
    tokenizer: PreTrainedTokenizerBase,
    *,
    wanted: Mapping[str | None, bool] | None = None,
) -> Tensor | Drop:
    """The score of one greedy response to the group's prompt (ReMax, arXiv:2310.10505).

    Not a REWARD node: the advantage needs it, validation does not. wanted: by domain, None for the
    others, whether its estimator reads it; if not, it is 0 and nothing is generated. None means
    everywhere.
    """
    if wanted is not None and not wanted.get(group.row.domain, wanted[None]):
        return torch.zeros(len(group.samples))
    (outcome,) = await reward_fn(await generate(group.greedy(), rollout, tokenizer))
    if not isinstance(outcome.reward_result, Score):  # an error is never a baseline of 0
        return Drop(TOO_FEW_SCORES, str(outcome.reward_result))
    return torch.full((len(group.samples),), outcome.reward_result.value, dtype=torch.float64)
