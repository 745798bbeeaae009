"""An advantage estimator over the agents of episodes, each with its own rewards."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from distflow.algorithms.advantages.group_estimator_base import on_last_token
from distflow.config import Config
from distflow.data.batch import Batch
from distflow.graph import BoundNode, Node, NodeOutput, node
from distflow.graph.bind import bind_alone
from distflow.pipelines.nodes.by_domain import columns_of
from distflow.runtime.compiled_node import NodeContext, compile_inputs
from distflow.training.engine import Collective


def by_agent(estimator: Callable[..., object], config: Config) -> Callable[..., object]:
    """The estimator if agents have their own rewards (`algorithm.agent_rewards`): it gets a row for each agent of an
    episode, with that agent's tokens, grouped with the same agent's rows of the group's other episodes."""
    agents, rewards = config.actor_rollout_ref.rollout.agents, config.algorithm.agent_rewards
    if rewards == "shared":
        return estimator
    part = bind_alone(Node("compute_advantage", estimator), config)
    reads = dict.fromkeys((*part.contract.reads, "token_level_rewards", "response_mask", "group_index", "valid"))
    optional = dict.fromkeys(name for name in (*part.contract.optional, "forks") if name not in reads)
    run = partial(of_agents, part=part, agents=[*agents], is_margin=rewards == "margin")
    return node(reads=(*reads, *(f"?{name}" for name in optional)), writes=part.contract.writes)(run)


def of_agents(
    batch: Batch, ctx: NodeContext, reduce: Collective, *, part: BoundNode, agents: Sequence[str], is_margin: bool
) -> NodeOutput:
    """is_margin: an agent's reward is its own minus the mean of the others that spoke in the episode."""
    mask, rewards = batch["response_mask"] > 0, batch["token_level_rewards"].double()
    speakers, num = batch.pad(batch.speakers(agents), "response"), len(agents)
    is_own = torch.stack([mask & (speakers == agent) for agent in range(num)])
    own, has_spoken = torch.where(is_own, rewards, 0.0), is_own.any(dim=-1)
    if is_margin:
        totals = own.sum(dim=-1)
        others = (totals.sum(dim=0) - totals) / (has_spoken.sum(dim=0) - 1).clamp(min=1)
        own = own - on_last_token(others.flatten(), is_own.flatten(0, 1)).view_as(own)
    rows = batch.select(torch.arange(len(batch)).repeat(num))
    rows["response_mask"], rows["token_level_rewards"] = is_own.flatten(0, 1), own.flatten(0, 1)
    rows["valid"] = (has_spoken & batch["valid"].bool()).flatten()
    rows["group_index"] = torch.cat([batch["group_index"] * num + agent for agent in range(num)])
    positional, keyword = compile_inputs(part, {"reduce": reduce})(rows, {"batch": rows, "ctx": ctx})
    returned = part.fn(*positional, **keyword)
    output = returned if isinstance(returned, NodeOutput) else NodeOutput(returned)
    columns = {}
    for name, value in columns_of(output.batch, part.contract.writes).items():
        rows[name] = value
        columns[name] = torch.where(is_own, rows[name].view_as(is_own), 0.0).sum(dim=0)
    return NodeOutput(columns, output.metrics, output.weight)
