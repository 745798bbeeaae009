"""A pipeline whose responses are those of its rows, so that runs on other workers train on the
same."""

from collections.abc import Mapping
from typing import Any

import transformers

from distflow import NodeRole, TaskGraph, node
from distflow.config import Config
from distflow.data.sample import Sample, Segment
from distflow.pipelines.grpo import grpo_pipeline
from distflow.pipelines.nodes.sample_responses import RESPONSE_FIELDS
from distflow.runtime.rollout_loop.group import Group

ANSWERS = "answers"
SAMPLED = "sampled"
"""Columns of a data set: token ids of each sample of the row's group, and the log-probs that they
were drawn with."""


def replayed(config: Config) -> TaskGraph:
    graph = grpo_pipeline(config)
    graph.update_node("rollout_actor", func=replay)
    return graph


@node(writes=RESPONSE_FIELDS, role=NodeRole.ROLLOUT, scope="group")
async def replay(group: Group, tokenizer: transformers.PreTrainedTokenizerBase) -> list[Sample]:
    """The recorded responses of the group's row."""
    recorded: Mapping[str, Any] = group.row.extra_info or {}
    samples = []
    for index, (ids, sampled) in enumerate(zip(recorded[ANSWERS], recorded[SAMPLED], strict=True)):
        versions = (group.prompt_group.version,) * len(ids)
        # nothing is truncated
        segment = Segment("policy", tuple(ids), tuple(sampled), tuple(sampled), versions)
        text = str(tokenizer.decode(ids, skip_special_tokens=True))
        reason = "length" if len(ids) == group.params.max_tokens else "stop"
        samples.append(group.sample(index, segment, text, reason))

    return samples
