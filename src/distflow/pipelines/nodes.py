"""The standard nodes of the built-in programs: each is one verb of the story that a program tells."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms.corrections import compute_rollout_weights
from distflow.algorithms.filters import drop_reason
from distflow.algorithms.kl import apply_kl_penalty as penalise
from distflow.algorithms.kl import make_kl_controller
from distflow.algorithms.registry import check_options, find_adv_est
from distflow.config import Config
from distflow.config.program import find_estimator
from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.environments.single_turn import single_turn
from distflow.environments.workflow import Turn
from distflow.graph import Drop, NodeOutput, NodeRole, node
from distflow.pipelines.objectives import policy_objective, policy_reads, policy_takes, sft_objective, value_objective
from distflow.rewards.verdict import Score
from distflow.rollout.engine import GenerateRequest, RolloutEngine
from distflow.runtime.context import NodeContext
from distflow.runtime.invoke import scores_on_last_token
from distflow.training.engine import Collective, LossFn, TrainEngine

RESPONSE_FIELDS = ("responses", "response_ids", "response_mask", "versions", "finish_reason", "truncated", "valid")
SAMPLED_FIELDS = (*RESPONSE_FIELDS, "rollout_log_probs", "sampling_log_probs")
SCORED_FIELDS = ("token_level_scores", "token_level_rewards", "reward_parts", "reward_errors", "valid")


def uses_reference(config: Config) -> bool:
    """Whether a KL term against the reference is on; without one the reference is not even built."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


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
    written["reward_errors"] = [None if ok else str(j.verdict) for ok, j in zip(valid, judgements, strict=True)]
    return NodeOutput(written)


@node(
    writes="reward_baselines",
    role=NodeRole.REWARD,
    scope="group",
    when=lambda config: config.algorithm.adv_estimator == "remax",
)
async def greedy_baseline(batch: Batch, rollout: RolloutEngine, ctx: NodeContext) -> Tensor:
    """Score of one greedy answer to the group's prompt (ReMax, arXiv:2310.10505)."""
    greedy = await generate(rollout, ctx.greedy())
    (judgement,) = await ctx.judge(greedy)
    score = judgement.verdict.value if isinstance(judgement.verdict, Score) else 0.0
    return torch.full((len(batch),), score)


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


def _is_decoupled(config: Config) -> bool:
    return config.actor_rollout_ref.actor.policy_loss == "decoupled"


@node(
    writes=lambda config: ("old_log_probs", "prox_log_probs") if _is_decoupled(config) else ("old_log_probs",),
    role=NodeRole.ACTOR,
    reads=("prompt_ids", "response_ids", "response_mask", "?rollout_log_probs"),
)
def compute_old_log_prob(batch: Batch, actor: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Log-probs of the sampled tokens under the policy before this step's update, by the trainer.

    For decoupled PPO they are those of the proximal policy, and the old ones are the rollout engine's own.
    """
    out = actor.forward(batch, ("log_probs", "entropy"))
    mask = batch.flat("loss_mask")
    written = batch.only(())
    written["old_log_probs"] = out.flat("log_probs")
    if _is_decoupled(ctx.config):
        written["prox_log_probs"] = out.flat("log_probs")
        written["old_log_probs"] = batch.flat("rollout_log_probs")
    entropy = float((out.flat("entropy") * mask).sum() / mask.sum().clamp(min=1))
    return NodeOutput(written, {"actor/entropy": entropy})


@node(
    writes="rollout_is_weights",
    role=NodeRole.ACTOR,
    scope="global",
    when="algorithm.rollout_correction.level",
    takes=("algorithm.rollout_correction",),
)
def correct_mismatch(
    old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, ctx: NodeContext, reduce: Collective
) -> NodeOutput:
    """Importance weights for what the rollout engine and the trainer disagree on."""
    settings = ctx.config.algorithm.rollout_correction
    weights, statistics = compute_rollout_weights(
        old_log_probs,
        rollout_log_probs,
        loss_mask,
        level=settings.level,  # type: ignore[arg-type]  # checked by the config
        mode=settings.mode,  # type: ignore[arg-type]
        cap=settings.cap,
        floor=settings.floor,
        reduce=reduce,
    )
    return NodeOutput({"rollout_is_weights": weights}, {f"correction/{k}": v for k, v in statistics.items()})


@node(
    writes="ref_log_prob",
    role=NodeRole.REFERENCE,
    reads=("prompt_ids", "response_ids"),
    when=uses_reference,
)
def compute_ref_log_prob(batch: Batch, ref: TrainEngine) -> Tensor:
    """Log-probs of the sampled tokens under the frozen reference."""
    return ref.forward(batch, ("log_probs",)).flat("log_probs")


@node(
    writes="token_level_rewards",
    role=NodeRole.REWARD,
    scope="global",
    when="algorithm.use_kl_in_reward",
    takes=("algorithm.kl_ctrl", "algorithm.kl_penalty"),
)
def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    valid: Tensor,
    ctx: NodeContext,
    reduce: Collective,
) -> NodeOutput:
    """Rewards less the KL to the reference, by a coefficient that may adapt (arXiv:1909.08593)."""
    settings = ctx.config.algorithm
    control = settings.kl_ctrl
    controller = make_kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
    if ctx.state:
        controller.load(ctx.state)
    coefficient = controller.value
    rewards, kl = penalise(
        token_level_scores,
        old_log_probs,
        ref_log_prob,
        response_mask,
        valid,
        kl_coef=coefficient,
        kl_penalty=settings.kl_penalty,
        reduce=reduce,
    )
    controller.update(kl, int(reduce.sum(len(valid))))
    ctx.state.update(controller.state())
    metrics = {"actor/reward_kl_penalty": kl, "actor/kl_coef": coefficient}
    return NodeOutput({"token_level_rewards": rewards}, metrics)


@node(writes="values", role=NodeRole.CRITIC, reads=("prompt_ids", "response_ids"))
def compute_value(batch: Batch, critic: TrainEngine) -> Tensor:
    """The critic's value before each response token."""
    return critic.forward(batch, ("values",)).flat("values")


def chosen_estimator(config: Config) -> Callable[..., Any]:
    """The estimator of `algorithm.adv_estimator`. Options that are no key of `algorithm` come from its kwargs."""
    estimator = find_adv_est(config.algorithm.adv_estimator)
    given = config.algorithm.adv_estimator_kwargs
    free = [name for name in estimator.options if not hasattr(config.algorithm, name)]
    check_options(f"estimator '{estimator.name}' (algorithm.adv_estimator_kwargs)", given, free)
    return functools.partial(estimator.fn, **given) if given else estimator.fn


@node(
    writes=("advantages", "returns"),
    role=NodeRole.ADVANTAGE,
    takes=("algorithm.adv_estimator", "algorithm.adv_estimator_kwargs"),
    chosen=chosen_estimator,
)
def compute_advantage() -> None:
    """Stands for the estimator that `algorithm.adv_estimator` names; `bind` puts it here."""


@node(
    writes=(),
    role=NodeRole.ACTOR,
    reads=policy_reads,
    takes=policy_takes,
)
def train_actor(batch: Batch, actor: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Update the policy: one optimizer step for each mini-batch of each epoch."""
    if ctx.step < ctx.config.trainer.critic_warmup:
        return NodeOutput(None)
    settings = ctx.config.actor_rollout_ref.actor
    objective = policy_objective(ctx.config)
    metrics = _train(batch, actor, objective, ctx, settings.ppo_epochs, settings.ppo_mini_batch_size)
    return NodeOutput(None, {f"actor/{name}": value for name, value in metrics.items()})


@node(
    writes=(),
    role=NodeRole.CRITIC,
    reads=("prompt_ids", "response_ids", "values", "returns", "loss_mask"),
    takes=tuple(f"critic.{n}" for n in ("ppo_epochs", "ppo_mini_batch_size", "cliprange_value", "loss_agg_mode")),
)
def train_critic(batch: Batch, critic: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Update the critic towards the returns."""
    settings, actor = ctx.config.critic, ctx.config.actor_rollout_ref.actor
    mini_batch = settings.ppo_mini_batch_size or actor.ppo_mini_batch_size
    metrics = _train(batch, critic, value_objective(ctx.config), ctx, settings.ppo_epochs, mini_batch)
    return NodeOutput(None, {f"critic/{name}": value for name, value in metrics.items()})


@node(
    writes=(),
    role=NodeRole.ACTOR,
    reads=("prompt_ids", "response_ids", "loss_mask"),
    takes=("actor_rollout_ref.actor.ppo_mini_batch_size",),
)
def train_sft(batch: Batch, actor: TrainEngine, ctx: NodeContext) -> NodeOutput:
    """Update the policy towards the data set's answers."""
    size = ctx.config.actor_rollout_ref.actor.ppo_mini_batch_size
    metrics = _train(batch, actor, sft_objective(ctx.config), ctx, epochs=1, num_prompts=size)
    return NodeOutput(None, {f"sft/{name}": value for name, value in metrics.items()})


def _train(
    batch: Batch, engine: TrainEngine, objective: LossFn, ctx: NodeContext, epochs: int, num_prompts: int
) -> dict[str, float]:
    """Mean of each metric over the optimizer steps; `skipped` is their number."""
    rows: dict[str, list[float]] = defaultdict(list)
    for epoch in range(epochs):
        for mini_batch in ctx.minibatches(batch, num_prompts, epoch):
            metrics = engine.train_step(mini_batch, objective)
            ctx.after_update(engine, mini_batch, metrics, not rows)
            for name, value in metrics.items():
                rows[name].append(value)
    return {name: sum(v) if name == "skipped" else sum(v) / len(v) for name, v in rows.items()}


def _needs_group(config: Config) -> bool:
    known = find_estimator(config)
    return known is not None and known.needs_group
