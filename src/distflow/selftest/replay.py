"""The built-in programs with recorded answers in place of sampled ones; everything behind the rollout is theirs."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.sample import Sample, Segment
from distflow.graph import NodeRole, TaskGraph, node
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.nodes.experience import ANSWER_FIELDS
from distflow.pipelines.ppo import ppo_pipeline
from distflow.runtime.group import Group

ANSWERS, SAMPLED = "answers", "sampled"
"""Columns of a data set: token ids of each sample of the row's group, and the log-probs that they were drawn with."""


def replayed(config: Config) -> TaskGraph:
    """The program of the estimator: PPO with a critic, else GRPO."""
    graph = ppo_pipeline(config) if config.algorithm.adv_estimator == "gae" else grpo_pipeline(config)
    graph.update_node("rollout_actor", func=replay)
    return graph


@node(writes=ANSWER_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def replay(group: Group, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Answer the group as its row says."""
    recorded: Mapping[str, Any] = group.row.extra_info or {}
    samples = []
    for index, (ids, sampled) in enumerate(zip(recorded[ANSWERS], recorded[SAMPLED], strict=True)):
        both = (tuple(sampled),) * 2  # nothing is cut off the policy
        segment = Segment("policy", tuple(ids), *both, (group.ticket.version,) * len(ids))
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        reason = "length" if len(ids) == group.params.max_tokens else "stop"
        samples.append(group.sample(index, segment, text, reason))
    return samples
