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
from distflow.pipelines.nodes.turn_rewards import reward_unit

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
    steps = _counted(reward_parts, "env_steps")
    columns = {
        "success": _counted(reward_parts, "success") == 1,
        "env_steps": steps,
        "finish_step": steps,
        "episode_len": _counted(reward_parts, "episode_len"),
    }

    won = defaultdict[str, list[float]](list)
    for parts, extra in zip(reward_parts, reward_extra, strict=True):
        if "success" in parts:
            won[_task(extra)].append(parts["success"])

    metrics = {"acting/env_steps": float(steps.sum())}
    for task, successes in won.items():
        metrics[f"acting/success/{task}"] = sum(successes) / len(successes)
    return NodeOutput(columns, metrics)


def _counted(parts: Sequence[Mapping[str, float]], name: str) -> Tensor:
    """A part of each episode, in whole numbers."""
    return torch.tensor([int(own.get(name, 0)) for own in parts])


def _task(extra: Mapping[str, Any]) -> str:
    """The instruction, as it may stand in the name of a metric."""
    words = re.sub(r"[^\w ,.()-]+", " ", str(extra.get("instruction", "")))
    return words.strip()[:_LONGEST_NAME]


def add_episode_columns(pipeline: Pipeline, config: Config) -> None:
    """The nodes that a pipeline of RL has for episodes in simulators."""
    pipeline.add_node("simulator_columns", simulator_columns)
    if config.algorithm.reward_level != "token":
        pipeline.add_node("step_rewards", place_rewards, ["function_reward"])


@node_factory
@node(role=NodeRole.REWARD, writes="token_level_scores", scope="group")
def place_rewards(config: Config) -> Callable[..., object]:
    """The node for `algorithm.reward_level`, action or chunk."""
    dim = None
    if config.algorithm.reward_level == "action":
        dim = tokens_of_action(config)
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
    step_rewards = [extra.get("step_rewards", ()) for extra in reward_extra]
    unit = reward_unit([sum(own, []) for own in step_rewards], scores.tolist())

    def in_units(number: float) -> float:
        return round(number / unit) * unit if unit else number

    placed = torch.zeros(turn_index.shape, dtype=torch.float64)
    drawn = torch.where(response_mask > 0, turn_index, -1)

    for row, score in enumerate(scores.tolist()):
        turns = drawn[row]
        for decision, rewards in enumerate(step_rewards[row]):
            places = (turns == decision).nonzero()[:, 0].tolist()
            for step, reward in enumerate(rewards):
                end = places[-1] if dim is None else places[dim * (step + 1) - 1]
                placed[row, end] += in_units(reward)

        own = (turns >= 0).nonzero()
        last = int(own.max()) if len(own) else 0
        placed[row, last] += in_units(score) - placed[row].sum()

    return placed
