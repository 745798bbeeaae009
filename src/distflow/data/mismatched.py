"""Responses that belong to other prompts: KTO measures with them how far a policy is from its
reference, since a policy that prefers responses whatever the prompt is has moved without learning
(arXiv:2402.01306, section 4.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.graph.fields import register_field

register_field("mismatched_ids", "object", "object", "token ids of the response to another prompt")
register_field("mismatched_mask", "object", "object", "1 on those that a policy would generate")
register_field(
    "ref_mismatched_log_prob", "float64", "sample", "log-prob of that response, by the reference"
)
register_field(
    "mismatched_log_ratio",
    "float64",
    "sample",
    "its log-prob by the policy before the update, minus the reference's; NaN without one",
)


@dataclass(frozen=True)
class Answered:
    """A prompt with its response."""

    number: int
    """By which the prompts of a mini-batch are in order on all ranks."""
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[float]


def answered(batch: Batch) -> list[Answered]:
    """The samples of a batch."""
    prompts = batch.flat("prompt_ids").split(batch.lengths("prompt").tolist())
    lengths = batch.lengths("response").tolist()
    responses = batch.flat("response_ids").split(lengths)
    masks = batch.flat("response_mask").split(lengths)
    rows = zip(batch["group_index"].tolist(), prompts, responses, masks, strict=True)
    return [Answered(number, *(each.tolist() for each in tokens)) for number, *tokens in rows]


def mismatched(rows: Sequence[Answered]) -> dict[int, Answered]:
    """By number, the nearest row before it with another prompt; the last row is before the first
    one. Without such a row there is none. As in TRL, if all prompts differ."""
    in_order = sorted(rows, key=lambda row: row.number)
    found = dict[int, Answered]()
    for place, row in enumerate(in_order):
        for distance in range(1, len(in_order)):
            other = in_order[place - distance]
            if other.prompt_ids != row.prompt_ids:
                found[row.number] = other
                break

    return found


def add_mismatched(batch: Batch, found: dict[int, Answered]) -> None:
    """Write the responses of `mismatched`."""
    others = [found.get(number) for number in batch["group_index"].tolist()]
    batch["mismatched_ids"] = [other.response_ids if other else [] for other in others]
    batch["mismatched_mask"] = [other.response_mask if other else [] for other in others]


def as_responses(batch: Batch) -> Batch:
    """The samples with their mismatched responses in place of their own."""
    lengths = torch.tensor([len(ids) for ids in batch["mismatched_ids"]], dtype=torch.int64)
    swapped = Batch(batch.lengths("prompt"), lengths)
    swapped["prompt_ids"] = batch.flat("prompt_ids")
    for name in ("ids", "mask"):
        tokens = [*chain.from_iterable(batch[f"mismatched_{name}"])]
        dtype = torch.int64 if name == "ids" else torch.float32
        swapped[f"response_{name}"] = torch.tensor(tokens, dtype=dtype)
    return swapped


def summed(log_probs: Tensor, swapped: Batch) -> Tensor:
    """The log-prob of each response, float64 `(bs,)`. log_probs: flat, of all tokens."""
    counted = torch.where(swapped.flat("response_mask") > 0, log_probs.double(), 0.0)
    return torch.zeros(len(swapped), dtype=torch.float64).index_add(0, swapped.rows(), counted)
