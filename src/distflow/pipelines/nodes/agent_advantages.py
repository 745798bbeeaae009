"""Advantages of agents with rewards of their own."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from distflow.algorithms.advantages.group_estimator_base import on_last_token
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.graph import BoundNode, Node, NodeOutput, node
from distflow.graph.bind_to_config import bind_alone
from distflow.pipelines.nodes.settings_by_domain import columns_of, run_part
from distflow.runtime.node_context import NodeContext
from distflow.training.engine import Collective


def by_agent(estimator: Callable[..., object], config: Config) -> Callable[..., object]:
    """The estimator if agents have their own rewards (`algorithm.agent_rewards`): it gets a row for
    each agent of an episode, with that agent's tokens, grouped with the same agent's rows of the
    group's other episodes."""
    agents = config.actor_rollout_ref.rollout.agents
    rewards = config.algorithm.agent_rewards
    if rewards == "shared":
        return estimator

    part = bind_alone(Node("compute_advantage", estimator), config)
    own = ("token_level_rewards", "response_mask", "group_index", "valid")

    reads = dict.fromkeys((*part.contract.reads, *own))
    for name in (*part.contract.optional, "forks"):
        if name not in reads:
            reads[f"?{name}"] = None

    declared = node(reads=tuple(reads), writes=part.contract.writes)
    return declared(partial(of_agents, part=part, agents=[*agents], is_margin=rewards == "margin"))


def of_agents(
    batch: Batch,
    ctx: NodeContext,
    reduce: Collective,
    *,
    part: BoundNode,
    agents: Sequence[str],
    is_margin: bool,
) -> NodeOutput:
    """is_margin: an agent's reward is its own minus the mean of the others that spoke in the
    episode."""
    mask = batch["response_mask"] > 0
    rewards = batch["token_level_rewards"].double()
    speakers = batch.pad(batch.speakers(agents), "response")
    num = len(agents)
    is_own = torch.stack([mask & (speakers == agent) for agent in range(num)])
    own = torch.where(is_own, rewards, 0.0)
    has_spoken = is_own.any(dim=-1)

    if is_margin:
        totals = own.sum(dim=-1)
        others = (totals.sum(dim=0) - totals) / (has_spoken.sum(dim=0) - 1).clamp(min=1)
        own = own - on_last_token(others.flatten(), is_own.flatten(0, 1)).view_as(own)

    rows = batch.select(torch.arange(len(batch)).repeat(num))
    rows["response_mask"] = is_own.flatten(0, 1)
    rows["token_level_rewards"] = own.flatten(0, 1)
    rows["valid"] = (has_spoken & batch["valid"].bool()).flatten()
    rows["group_index"] = torch.cat([batch["group_index"] * num + agent for agent in range(num)])
    output = run_part(part, rows, ctx, reduce)

    columns = {}
    for name, value in columns_of(output.batch, part.contract.writes).items():
        rows[name] = value
        columns[name] = torch.where(is_own, rows[name].view_as(is_own), 0.0).sum(dim=0)

    return NodeOutput(columns, output.metrics, output.weight)
