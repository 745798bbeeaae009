"""The samples of a batch as checks read them: plain columns of one sample, its conversations, and
whose tokens they are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distflow.config import Config
from distflow.config.derived_settings import policies_of_agents, policy_of_conversation
from distflow.data.batch import Batch
from distflow.graph.fields import TOKEN_AXES

Sample = Mapping[str, Any]
"""One sample, by column name: a tensor for each per-token column, a value for the others."""


class Conversation(NamedTuple):
    """One of a sample's conversations."""

    name: str
    """Empty for the first one."""
    first: int
    """Token i is the response's token `first` + i, or one of the prompt if that is negative."""
    ids: list[int]


def samples_of(batch: Batch) -> list[Sample]:
    """The samples of a batch, each with its own tokens only."""
    columns: dict[str, Sequence[Any]] = {}
    for name in (*batch.names, "loss_mask", "token_level_scores"):
        if name not in batch or name in columns:
            continue

        axis = batch.field(name).axis
        flat = batch.flat(name)

        if axis in TOKEN_AXES:
            columns[name] = flat.split(batch.lengths(axis).tolist())
        elif isinstance(flat, Tensor) and flat.dim() == 1:
            columns[name] = flat.tolist()
        else:
            columns[name] = list(flat)

    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch))]


def by_group_of(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(int(sample["group_index"]), []).append(sample)
    return groups


def index_of(sample: Sample) -> int:
    """The sample's position in its group."""
    return int(str(sample["uid"]).split("-")[1])


def conversations_of(sample: Sample) -> list[Conversation]:
    """The sample's conversations, in the order of its tokens."""
    prompt = sample["prompt_ids"].tolist()
    response = sample["response_ids"].tolist()
    forks = sample.get("forks", ())
    starts = [start for _, start in forks]
    ends = [*starts, len(response)]
    found = [Conversation("", -len(prompt), [*prompt, *response[: ends[0]]])]
    for (name, start), end in zip(forks, ends[1:], strict=True):
        found.append(Conversation(name, start, response[start:end]))
    return found


def policies_of_conversations(config: Config, sample: Sample) -> list[str]:
    """The policy of each of the sample's conversations, by the config; empty names if all have one
    policy."""
    return [policy_of_conversation(config, talk.name) for talk in conversations_of(sample)]


def own_tokens(config: Config, sample: Sample, policy: str) -> Tensor:
    """bool, for each token of the response: whether it is in a conversation of the policy. With one
    policy, all are."""
    own = torch.ones(len(sample["response_ids"]), dtype=torch.bool)
    if not policies_of_agents(config):
        return own

    owners = policies_of_conversations(config, sample)
    for talk, owner in zip(conversations_of(sample), owners, strict=True):
        own[max(talk.first, 0) : talk.first + len(talk.ids)] = owner in ("", policy)
    return own


def doubles(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float64)
