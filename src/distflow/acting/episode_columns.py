"""Nodes of episodes in simulators: what the workflow counted as columns, and rewards on the tokens
of their actions."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distflow.acting.action_tokens import tokens_of_action
from distflow.config import Config
from distflow.graph import NodeOutput, NodeRole, Pipeline, node, node_factory
from distflow.graph.fields import register_field
from distflow.pipelines.nodes.rollout_reward_filter import reward_unit

_LONGEST_NAME = 60
"""Characters of a task in the name of a metric."""

register_field("success", "bool", "sample", "the episode reached its goal")
register_field("env_steps", "int64", "sample", "env steps that were executed")
register_field("finish_step", "int64", "sample", "the env step that ended the episode, from 1")
register_field("episode_len", "int64", "sample", "decisions of the policy")


@node(writes=("success", "env_steps", "finish_step", "episode_len"), scope="group")
def simulator_columns(
    reward_parts: list[Mapping[str, float]], reward_extra: list[Mapping[str, Any]]
) -> NodeOutput:
    """What the workflow `simulator` counted, as columns; 0 for episodes without a score. The group
    has one start state."""
    steps = torch.tensor([int(parts.get("env_steps", 0)) for parts in reward_parts])
    columns = {
        "success": torch.tensor([parts.get("success", 0.0) == 1.0 for parts in reward_parts]),
        "env_steps": steps,
        "finish_step": steps,
        "episode_len": torch.tensor([int(parts.get("episode_len", 0)) for parts in reward_parts]),
    }
    return NodeOutput(
        columns, {"acting/env_steps": float(steps.sum()), **_successes(reward_parts, reward_extra)}
    )


def _successes(
    parts: Sequence[Mapping[str, float]], extra: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Of a group: its share of successes by task."""
    won = defaultdict[str, list[float]](list)
    for own, told in zip(parts, extra, strict=True):
        if "success" in own:
            task = re.sub(r"[^\w ,.()-]+", " ", str(told.get("instruction", ""))).strip()[
                :_LONGEST_NAME
            ]
            won[task].append(own["success"])
    return {f"acting/success/{task}": sum(each) / len(each) for task, each in won.items()}


def add_episode_columns(pipeline: Pipeline, config: Config) -> None:
    """The nodes that a pipeline of RL has for episodes in simulators."""
    pipeline.add_node("simulator_columns", simulator_columns)
    if config.algorithm.reward_level != "token":
        pipeline.add_node("step_rewards", place_rewards, ["function_reward"])


@node_factory
@node(role=NodeRole.REWARD, writes="token_level_scores", scope="group")
def place_rewards(config: Config) -> Callable[..., object]:
    """The node for `algorithm.reward_level`, action or chunk."""
    dim = tokens_of_action(config) if config.algorithm.reward_level == "action" else None
    return partial(reward_steps, dim=dim)


def reward_steps(
    scores: Tensor,
    reward_extra: list[Mapping[str, Any]],
    turn_index: Tensor,
    response_mask: Tensor,
    *,
    dim: int | None,
) -> Tensor:
    """Each env step's part of the score on the last token of its action, which has `dim` tokens, or
    of its chunk if `dim` is None. The rest of the score is on the policy's last token."""
    parts = [extra.get("step_rewards", ()) for extra in reward_extra]
    unit = reward_unit(
        [[each for own in steps for each in own] for steps in parts], scores.tolist()
    )
    placed = torch.zeros(turn_index.shape, dtype=torch.float64)
    drawn = torch.where(response_mask > 0, turn_index, -1)
    for row, (score, steps, turns) in enumerate(zip(scores.tolist(), parts, drawn, strict=True)):
        last = int((turns >= 0).nonzero().max()) if bool((turns >= 0).any()) else 0
        for decision, own in enumerate(steps):
            places = (turns == decision).nonzero()[:, 0].tolist()
            for step, reward in enumerate(own):
                end = places[-1] if dim is None else places[dim * (step + 1) - 1]
                placed[row, end] += round(reward / unit) * unit if unit else 0.0
        placed[row, last] += (round(score / unit) * unit if unit else score) - placed[row].sum()
    return placed
