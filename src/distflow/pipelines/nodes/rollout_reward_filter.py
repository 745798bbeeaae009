"""Nodes of the rollout loop: they generate a group's responses, or read them from the data set,
score them, and drop groups that cannot be trained on or have no learning signal."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.algorithms.group_filter import TOO_FEW_SCORES, Band, drop_reason
from distflow.builtin_names import ESTIMATORS, WHOLE_SCORE
from distflow.config import Config
from distflow.config.derived_settings import algorithm_of
from distflow.config.keys.reward import OnError, on_error_of
from distflow.data.batch import Written
from distflow.data.encoded_prompts import PromptRow
from distflow.data.sample import ENV_ERROR, Sample, Segment
from distflow.errors import UserError
from distflow.graph import Drop, NodeRole, node, node_factory
from distflow.import_target import LoadError, load_function
from distflow.rewards.reward_results import ACC, Score
from distflow.rewards.router import RewardOutcome, RewardRouter
from distflow.rollout.engine import GenerateRequest, RolloutEngine
from distflow.runtime.node_context import NodeContext
from distflow.runtime.rollout_loop.group import Group, sample_of_row
from distflow.runtime.rollout_loop.row_loader import SAMPLES_OF_ROW
from distflow.scheduling.group_states import PromptGroup

REJECTED = "rejected"
RESPONSE_FIELDS = (
    "responses",
    "response_ids",
    "response_mask",
    "versions",
    "finish_reason",
    "truncated",
    "valid",
)
SAMPLED_FIELDS = (*RESPONSE_FIELDS, "rollout_log_probs", "sampling_log_probs")


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def generate(
    group: Group, rollout: RolloutEngine, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Generate responses to the group's prompt: one sample for each index in the group."""
    request = GenerateRequest(
        group.row.prompt_ids, group.wanted, group.params, group.stream, images=group.row.images
    )
    samples: list[Sample] = []
    for drawn in await rollout.generate(request):
        text = str(tokenizer.decode(list(drawn.token_ids), skip_special_tokens=True))
        samples.append(group.sample(drawn.sample, drawn, text, drawn.finish_reason or "stop"))
    return samples


@node(writes=RESPONSE_FIELDS, scope="group")
async def load_responses(group: Group, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The data set's own responses instead of sampled ones (supervised fine-tuning).

    The text of a conversation keeps its special tokens, which mark the turns.
    """
    return response_of_row(group.prompt_group, group.row, tokenizer)


def response_of_row(
    prompt_group: PromptGroup, row: PromptRow, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    assert row.response_ids is not None, "an SFT pipeline's rows have responses"
    text = str(tokenizer.decode(list(row.response_ids), skip_special_tokens=row.turns is None))
    return [sample_of_row(prompt_group, row, 0, row.answer(prompt_group.version), text)]


@node(writes=RESPONSE_FIELDS, scope="group")
async def load_pairs(group: Group, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The data set's pair of responses: sample 0 is the chosen one, sample 1 the rejected one."""
    return pair_of_row(group.prompt_group, group.row, tokenizer)


def pair_of_row(
    prompt_group: PromptGroup, row: PromptRow, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    samples = list[Sample]()
    for index, ids in enumerate((row.response_ids or (), row.rejected_ids or ())):
        zeros = (0.0,) * len(ids)
        segment = Segment("policy", ids, zeros, zeros, (prompt_group.version,) * len(ids))
        text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
        samples.append(sample_of_row(prompt_group, row, index, [segment], text))
    return samples


setattr(load_responses, SAMPLES_OF_ROW, response_of_row)
setattr(load_pairs, SAMPLES_OF_ROW, pair_of_row)


SCORED_FIELDS = ("scores", "acc", "valid", "reward_parts", "reward_extra", "reward_errors")
EPISODE_FIELDS = (*SCORED_FIELDS, "token_level_scores", "turn_index", "turn_order")
NO_DOMAINS: Mapping[str, tuple[int, OnError]] = MappingProxyType({})


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
    own = {
        name: (
            num_needed(algorithm_of(config, name).adv_estimator),
            on_error_of(config.reward, name),
        )
        for name in {**config.reward.domains, **config.algorithm.domains}
    }
    needed = num_needed(config.algorithm.adv_estimator)
    on_error = config.reward.on_error
    return {"min_valid": needed, "on_error": on_error, "domains": own}


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
    outcomes = [
        each.outcome if isinstance(each.outcome, RewardOutcome) else None for each in samples
    ]
    num_rejected = sum(sample.rejected for sample in samples)
    if num_rejected and not ctx.validating and len(samples) - num_rejected < max(min_valid, 1):
        return Drop(REJECTED)
    needed = min_valid + num_rejected  # rejected ones count as scored there
    columns = _scored(
        [outcome or NO_OUTCOME for outcome in outcomes], ctx.validating, needed, on_error
    )
    if not isinstance(columns, Drop):
        columns["valid"] = [
            bool(v) and not s.rejected for v, s in zip(columns["valid"], samples, strict=True)
        ]
        scores = cast(list[float], columns["scores"])
        earned = [_earned(sample) for sample in samples]
        step = reward_unit(earned, scores)
        turns = [_by_turn(*each, step) for each in zip(samples, scores, earned, strict=True)]
        tokens = [token for sample in turns for token in sample]
        placed, index, order = (
            torch.tensor([token[part] for token in tokens], dtype=torch.float64)
            for part in range(3)
        )
        written = {"token_level_scores": placed, "turn_index": index, "turn_order": order}
        return {**columns, **written}
    is_env = any(sample.finish_reason == ENV_ERROR for sample in samples)
    return replace(columns, reason=ENV_ERROR) if is_env else columns


def _drawn(sample: Sample) -> list[Segment]:
    return [
        segment
        for segment in sample.response_segments
        if segment.owner == "policy" and segment.token_ids
    ]


def _earned(sample: Sample) -> list[float]:
    """The reward of each turn, in the order of the sample; 0 if the episode has no score."""
    has_score = isinstance(sample.outcome, RewardOutcome) and isinstance(
        sample.outcome.reward_result, Score
    )
    return [segment.reward * has_score for segment in _drawn(sample)]


def reward_unit(earned: Sequence[Sequence[float]], scores: Sequence[float]) -> float:
    """The unit of which a group's turn rewards are multiples, so that float64 represents them and
    their sums exactly and equal scores stay equal. 0 if no turn has a reward."""
    sizes = [math.fsum(map(abs, own)) for own in earned]
    largest = max(size + abs(score) for size, score in zip(sizes, scores, strict=True))
    return math.ldexp(1.0, math.frexp(largest)[1] - 52) if any(sizes) else 0.0


def _by_turn(
    sample: Sample, score: float, earned: Sequence[float], step: float
) -> list[tuple[float, int, int]]:
    """For each response token: its reward, the number of its turn, and that turn's place in time;
    -1 if it has none. A turn's reward is on its last token, and the rest of the score on that of
    the last turn in time. step: see `reward_unit`."""
    score, *earned = (round(value / step) * step if step else value for value in (score, *earned))
    if earned:
        earned[sample.last_turn] += score - math.fsum(earned)
    in_time = sorted(
        range(len(earned)), key=[segment.turn for segment in _drawn(sample)].__getitem__
    )
    places = {turn: place for place, turn in enumerate(in_time)}
    tokens = list[tuple[float, int, int]]()
    turn = 0
    for segment in sample.response_segments:
        length = len(segment.token_ids)
        if segment.owner != "policy":
            tokens += [(0.0, -1, -1)] * length
        elif length:
            of_turn = turn, places[turn]
            tokens += [*[(0.0, *of_turn)] * (length - 1), (earned[turn], *of_turn)]
            turn += 1
    return tokens


NO_OUTCOME = RewardOutcome(Score(0.0))
"""The outcome of a rejected episode."""


def _scored(
    outcomes: Sequence[RewardOutcome], validating: bool, min_valid: int, on_error: OnError
) -> dict[str, list[object]] | Drop:
    results = [outcome.reward_result for outcome in outcomes]
    scores = [result if isinstance(result, Score) else None for result in results]
    errors = [None if isinstance(result, Score) else str(result) for result in results]
    failed = [error for error in errors if error is not None]
    substitute = on_error if isinstance(on_error, float) and not validating else None
    if failed and substitute is None and not validating:
        too_few = len(outcomes) > 1 and len(outcomes) - len(failed) < min_valid
        if too_few or on_error == "drop":
            return Drop(TOO_FEW_SCORES, failed[0])
    return {
        "scores": [substitute or 0.0 if score is None else score.value for score in scores],
        "acc": [outcome.accuracy for outcome in outcomes],
        "valid": [score is not None or substitute is not None for score in scores],
        "reward_parts": [outcome.scores() for outcome in outcomes],
        "reward_extra": [
            outcome.remarks() if score is None else score.extra
            for score, outcome in zip(scores, outcomes, strict=True)
        ],
        "reward_errors": list(errors),
    }


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


@node(role=NodeRole.DYNAMIC_SAMPLING, writes=())
def dynamic_sampling(
    acc: Tensor,
    scores: Tensor,
    valid: Tensor,
    reward_parts: list[dict[str, float]] | None = None,
    reward_errors: list[str | None] | None = None,
    domain: list[str] | None = None,
    *,
    metric: str,
    mean_range: Band | None = None,
    unfiltered: Sequence[str] = (),
) -> Drop | None:
    """DAPO (arXiv:2503.14476, equation 11): a group whose samples are all right or all wrong has no
    learning signal and is replaced; so is one whose mean is outside `mean_range`.

    metric: `acc` is that accuracy; `score` (or `seq_reward`) the whole score, including penalties;
    else a part of the reward. A sample with a reward error counts only with the whole score that
    `on_error` assigned, and one without the part does not count. unfiltered: domains whose groups
    are kept.
    """
    if domain and domain[0] in unfiltered:
        return None
    if reward_errors is not None and metric not in WHOLE_SCORE:
        valid = valid & torch.tensor([error is None for error in reward_errors])
    if metric in WHOLE_SCORE:
        acc = scores
    elif metric != ACC:
        if reward_parts is None:
            raise UserError(
                f"algorithm.filter_groups.metric={metric}: no node writes reward_parts; set it to "
                f"{ACC}"
            )
        acc = torch.tensor([part.get(metric, 0.0) for part in reward_parts], dtype=torch.float64)
        valid = valid & torch.tensor([metric in part for part in reward_parts])
    reason = drop_reason(acc, valid, mean_range)
    return Drop(reason) if reason else None


@node_factory
@node(role=NodeRole.DYNAMIC_SAMPLING, writes=())
def filter_groups(config: Config) -> Callable[..., object]:
    """The function of `algorithm.filter_groups.should_accept`. Raises UserError for an unusable
    one."""
    key = "algorithm.filter_groups.should_accept"
    target = str(config.algorithm.filter_groups.should_accept)
    try:
        function = load_function(target)
    except LoadError as error:
        raise UserError(f"{key}: {error}") from error
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key}={target} is an async function: use a synchronous one")

    @wraps(function)
    def accept(*columns: object, **named: object) -> Drop | None:
        return drop_unless(function(*columns, **named))

    return accept


def drop_unless(accepted: object) -> Drop | None:
    """accepted: the result of a `should_accept`; a str is the reason for rejecting the group."""
    if isinstance(accepted, str):
        return Drop(accepted)
    return None if accepted is None or bool(accepted) else Drop(REJECTED)
