"""Nodes of the experience plane: from a prompt to a judged, filtered group. They work on samples."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.algorithms.filters import TOO_FEW_VERDICTS, drop_reason
from distflow.config import Config
from distflow.config.errors import UserError
from distflow.config.names import WHOLE_SCORE
from distflow.config.program import find_estimator
from distflow.data.sample import Sample, Segment
from distflow.graph import Drop, NodeRole, node, node_factory
from distflow.rewards.correctness import ACC
from distflow.rewards.router import RewardRouter
from distflow.rewards.verdict import Score
from distflow.rollout.engine import GenerateRequest, RolloutEngine
from distflow.runtime.context import NodeContext
from distflow.runtime.group import Group

ANSWER_FIELDS = ("responses", "response_ids", "response_mask", "versions", "finish_reason", "truncated", "valid")
SAMPLED_FIELDS = (*ANSWER_FIELDS, "rollout_log_probs", "sampling_log_probs")
SCORED_FIELDS = ("scores", "acc", "valid", "reward_parts", "reward_extra", "reward_errors")


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def generate(group: Group, rollout: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Answer the group's prompt: one sample for each index that the group wants."""
    prompt_ids = tuple(group.row.prompt_ids)
    result = await rollout.generate(GenerateRequest(prompt_ids, group.wanted, group.params, group.stream))
    return [
        group.sample(
            made.sample,
            Segment(
                "policy",
                tuple(made.token_ids),
                tuple(made.rollout_log_probs),
                tuple(made.sampling_log_probs),
                tuple(made.versions),
            ),
            str(tokenizer.decode(made.token_ids, skip_special_tokens=True)),
            made.finish_reason,
        )
        for made in result.generations
    ]


@node(writes=ANSWER_FIELDS, scope="group")
async def load_answers(group: Group, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The data set's own answers in place of sampled ones (supervised fine-tuning).

    The text of a conversation keeps its special tokens: they tell where whose turn begins.
    """
    assert group.row.response_ids is not None, "the data of a program that learns answers have them"
    is_plain = group.row.turns is None
    text = str(tokenizer.decode(list(group.row.response_ids), skip_special_tokens=is_plain))
    sample = group.sample(0, None, text, "stop")
    return [replace(sample, segments=[*sample.segments, *group.row.answer(group.ticket.version)])]


@node_factory
@node(role=NodeRole.REWARD, writes=SCORED_FIELDS)
def compute_reward(config: Config) -> Callable[..., object]:
    """Judge each sample as its group completes, by the functions of its domain.

    An estimator that compares samples needs two with a verdict; a group with fewer is dropped.
    """
    estimator = find_estimator(config)
    return partial(judge_samples, min_valid=2 if estimator and estimator.needs_group else 0)


@node(writes=SCORED_FIELDS, role=NodeRole.REWARD, scope="group", reads=("responses", "domain", "ground_truth"))
async def judge_samples(
    samples: Sequence[Sample], judge: RewardRouter, ctx: NodeContext, *, min_valid: int
) -> dict[str, list[object]] | Drop:
    """A sample without a verdict is invalid, never a 0."""
    judgements = await judge(samples)
    verdicts = [judgement.verdict for judgement in judgements]
    valid = [isinstance(verdict, Score) for verdict in verdicts]
    if len(samples) > 1 and sum(valid) < min_valid and not ctx.validating:
        return Drop(TOO_FEW_VERDICTS, str(next(v for v in verdicts if not isinstance(v, Score))))
    return {
        "scores": [verdict.value if isinstance(verdict, Score) else 0.0 for verdict in verdicts],
        "acc": [judgement.accuracy for judgement in judgements],
        "valid": list(valid),
        "reward_parts": [judgement.scores() for judgement in judgements],
        "reward_extra": [verdict.extra if isinstance(verdict, Score) else {} for verdict in verdicts],
        "reward_errors": [None if isinstance(verdict, Score) else str(verdict) for verdict in verdicts],
    }


@node(writes="reward_baselines", scope="group", reads=("responses",))
async def greedy_baseline(
    group: Group, rollout: RolloutEngine, judge: RewardRouter, tokenizer: PreTrainedTokenizerBase
) -> Tensor | Drop:
    """Score of one greedy answer to the group's prompt (ReMax, arXiv:2310.10505).

    No REWARD node: it serves the advantage, and a validation has no use for it.
    """
    (judgement,) = await judge(await generate(group.greedy(), rollout, tokenizer))
    if not isinstance(judgement.verdict, Score):  # a fault is never a baseline of 0
        return Drop(TOO_FEW_VERDICTS, str(judgement.verdict))
    return torch.full((len(group.samples),), judgement.verdict.value)


@node(role=NodeRole.DYNAMIC_SAMPLING, writes=())
def dynamic_sampling(
    acc: Tensor,
    scores: Tensor,
    valid: Tensor,
    reward_parts: list[dict[str, float]] | None = None,
    domain: list[str] | None = None,
    *,
    metric: str,
    unfiltered: Sequence[str] = (),
) -> Drop | None:
    """DAPO (arXiv:2503.14476, equation 11): a group whose samples are all right, or all wrong, teaches nothing and is
    replaced.

    metric: `acc` is that accuracy; `score` (or `seq_reward`) the whole score, penalties too; else a part of the reward.
    unfiltered: domains whose groups are kept.
    """
    if domain and domain[0] in unfiltered:
        return None
    if metric in WHOLE_SCORE:
        acc = scores
    elif metric != ACC:
        if reward_parts is None:
            raise UserError(f"algorithm.filter_groups.metric={metric}: no node writes reward_parts; set it to {ACC}")
        acc = torch.tensor([part.get(metric, 0.0) for part in reward_parts])
    reason = drop_reason(acc, valid)
    return Drop(reason) if reason else None
