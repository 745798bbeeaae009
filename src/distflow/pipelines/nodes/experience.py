"""Nodes of the experience plane: from a prompt to a judged, filtered group."""

from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.filters import drop_reason
from distflow.config import Config
from distflow.config.program import find_estimator
from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.environments.single_turn import single_turn
from distflow.environments.workflow import Turn
from distflow.graph import Drop, NodeOutput, NodeRole, node
from distflow.rewards.verdict import Score
from distflow.rollout.engine import GenerateRequest, RolloutEngine
from distflow.runtime.context import NodeContext
from distflow.runtime.invoke import scores_on_last_token

RESPONSE_FIELDS = ("responses", "response_ids", "response_mask", "versions", "finish_reason", "truncated", "valid")


SAMPLED_FIELDS = (*RESPONSE_FIELDS, "rollout_log_probs", "sampling_log_probs")


SCORED_FIELDS = ("token_level_scores", "token_level_rewards", "reward_parts", "reward_extra", "reward_errors", "valid")


@node(writes=SAMPLED_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def generate(rollout: RolloutEngine, ctx: NodeContext) -> Batch:
    """Answer the group's prompt: one sample for each index that the group wants."""
    group = ctx.group
    assert group is not None, "generate runs in the experience plane"

    async def answer(prompt_ids: Any) -> list[Turn]:
        request = GenerateRequest(tuple(prompt_ids), group.samples, group.params, group.stream)
        result = await rollout.generate(request)
        return [
            Turn(
                Segment(
                    "policy",
                    tuple(g.token_ids),
                    tuple(g.rollout_log_probs),
                    tuple(g.sampling_log_probs),
                    tuple(g.versions),
                ),
                ctx.tokenizer.decode(g.token_ids, skip_special_tokens=True),
                g.finish_reason,
            )
            for g in result.generations
        ]

    return Batch.from_samples(await single_turn(answer, group.row, group.ticket))


@node(writes=RESPONSE_FIELDS, scope="group")
async def load_answers(ctx: NodeContext) -> Batch:
    """The data set's own answers in place of sampled ones (supervised fine-tuning)."""
    group = ctx.group
    assert group is not None and group.row.response_ids is not None
    answer = tuple(group.row.response_ids)
    zeros = (0.0,) * len(answer)
    segment = Segment("policy", answer, zeros, zeros, (group.ticket.version,) * len(answer))
    turn = Turn(segment, ctx.tokenizer.decode(answer, skip_special_tokens=True), "stop")

    async def read(prompt_ids: Any) -> list[Turn]:
        return [turn]

    return Batch.from_samples(await single_turn(read, group.row, group.ticket))


def reward_takes(config: Config) -> tuple[str, ...]:
    """A function's name without its file names nothing."""
    has_file = config.custom_reward_function.path is not None
    return ("reward", "custom_reward_function" if has_file else "custom_reward_function.path")


@node(writes=SCORED_FIELDS, role=NodeRole.REWARD, scope="group", takes=reward_takes)
async def compute_reward(batch: Batch, ctx: NodeContext) -> NodeOutput | Drop:
    """Judge each sample as its group completes. A sample without a verdict is invalid, never a 0."""
    judgements = await ctx.judge(batch)
    valid = [isinstance(j.verdict, Score) for j in judgements]
    if _needs_group(ctx.config) and len(batch) > 1 and sum(valid) < 2 and not ctx.validating:
        failures = (str(j.verdict) for j, ok in zip(judgements, valid, strict=True) if not ok)
        return Drop("too_few_verdicts", next(failures))
    scores = [j.verdict.value if isinstance(j.verdict, Score) else 0.0 for j in judgements]
    rewards = scores_on_last_token(batch, scores)
    written = batch.only(batch.names)
    written["token_level_scores"] = rewards
    written["token_level_rewards"] = rewards
    written["valid"] = torch.tensor(valid)
    written["reward_parts"] = [j.scores() for j in judgements]
    written["reward_extra"] = [j.verdict.extra if isinstance(j.verdict, Score) else {} for j in judgements]
    written["reward_errors"] = [None if ok else str(j.verdict) for ok, j in zip(valid, judgements, strict=True)]
    return NodeOutput(written)


@node(
    writes="reward_baselines",
    scope="group",
    when=lambda config: config.algorithm.adv_estimator == "remax",
)
async def greedy_baseline(batch: Batch, rollout: RolloutEngine, ctx: NodeContext) -> Tensor | Drop:
    """Score of one greedy answer to the group's prompt (ReMax, arXiv:2310.10505).

    No REWARD node: it serves the advantage, and a validation has no use for it.
    """
    greedy = await generate(rollout, ctx.greedy())
    (judgement,) = await ctx.judge(greedy)
    if not isinstance(judgement.verdict, Score):  # a fault is never a baseline of 0
        return Drop("too_few_verdicts", str(judgement.verdict))
    return torch.full((len(batch),), judgement.verdict.value)


@node(
    role=NodeRole.DYNAMIC_SAMPLING,
    scope="group",
    writes=(),
    when="algorithm.filter_groups.enable",
    takes=("algorithm.filter_groups",),
)
def dynamic_sampling(token_level_scores: Tensor, valid: Tensor, reward_parts: list, *, metric: str) -> Drop | None:
    """DAPO (arXiv:2503.14476): a group whose samples all score the same teaches nothing and is replaced."""
    if metric == "score":
        values = token_level_scores.sum(-1)
    else:
        values = torch.tensor([parts.get(metric, 0.0) for parts in reward_parts])
    reason = drop_reason(values, valid)
    return Drop(reason) if reason else None


def _needs_group(config: Config) -> bool:
    known = find_estimator(config)
    return known is not None and known.needs_group
