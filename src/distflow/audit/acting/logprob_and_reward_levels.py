"""Formulas of `algorithm.logprob_level` and `reward_level`, for checks of steps. Only runs that use them import it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distflow.audit.acting.simulator_episodes import tokens_of_action
from distflow.audit.audited_step.policy_loss_formulas import Tokens
from distflow.audit.check import Sample
from distflow.audit.recorded_step import RecordedStep, index_of
from distflow.config import Config


def dim_of(config: Config, level: str) -> int:
    """Tokens of an action, or 0 for whole chunks."""
    options: Any = config.actor_rollout_ref.rollout.workflow_kwargs["actions"]
    return tokens_of_action(options) if level == "action" else 0


def by_unit(tokens: Tokens, units: Tensor) -> Tokens:
    """Units in place of tokens: the sum of their log-probs, and the mean of their advantages."""
    size = torch.bincount(units).double()

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(len(size), dtype=torch.float64).index_add(0, units, values)

    columns = {"advantages": summed(tokens.advantages) / size}
    if "old_log_probs" in tokens.columns:
        columns["old_log_probs"] = summed(tokens.old)
    return Tokens(summed(tokens.now), columns, tokens.sample.new_zeros(len(size)).scatter(0, units, tokens.sample))


def rewards_of_steps(recorded: RecordedStep, sample: Sample, total: float) -> list[float] | None:
    """The score of each token by what the simulator returned for each env step: on the last token of its action, or of
    its chunk; the rest on the policy's last token. None if the episode's events are not known."""
    record = recorded.record_of(sample)
    events: Sequence[tuple[Any, ...]] = record.events.get(index_of(sample), ()) if record is not None else ()
    results = [event[3] for event in events if event[:2] == ("called", "act")]
    turns, placed = sample["turn_index"].tolist(), [0.0] * len(sample["response_ids"])
    if not results or sample["reward_errors"] is not None:
        return None
    dim, has_won = dim_of(recorded.config, recorded.config.algorithm.reward_level), False
    counts_returns = recorded.config.actor_rollout_ref.rollout.workflow_kwargs.get("score") == "return"
    for number, result in enumerate(results):
        own = [place for place, turn in enumerate(turns) if turn == number]
        for step, (reward, won) in enumerate(zip(result["rewards"], result["success"], strict=True)):
            part = reward if counts_returns else float(won and not has_won)
            placed[own[dim * step + dim - 1] if dim else own[-1]] += part
            has_won = has_won or won
    placed[max(place for place, turn in enumerate(turns) if turn >= 0)] += total - math.fsum(placed)
    return placed
