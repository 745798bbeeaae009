"""Responses to other prompts of a mini-batch: whose, and the log-probs of their own tokens."""

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.mismatched import (
    Answered,
    add_mismatched,
    answered,
    as_responses,
    mismatched,
    summed,
)


def row(number: int, prompt: int) -> Answered:
    return Answered(number, [prompt], [100 + number], [1.0])


def owners(rows: list[Answered]) -> dict[int, int]:
    return {number: other.number for number, other in mismatched(rows).items()}


def test_the_row_before_it_with_another_prompt() -> None:
    """In order of their numbers, whichever rank they come from."""
    assert owners([row(7, 1), row(3, 2), row(5, 3)]) == {3: 7, 5: 3, 7: 5}
    assert owners([row(0, 1), row(1, 1), row(2, 2), row(3, 1)]) == {0: 2, 1: 2, 2: 1, 3: 2}
    assert owners([row(0, 1), row(1, 1)]) == {}
    assert owners([row(0, 1)]) == {}
    assert owners([]) == {}


def test_responses_are_swapped_and_summed_without_given_tokens() -> None:
    batch = Batch(torch.tensor([1, 2, 1]), torch.tensor([3, 1, 2]))
    batch["group_index"] = torch.tensor([4, 2, 9])
    batch["prompt_ids"] = torch.tensor([11, 12, 13, 14])
    batch["response_ids"] = torch.tensor([1, 2, 3, 4, 5, 6])
    batch["response_mask"] = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    found = mismatched(answered(batch))
    del found[9]  # no other prompt
    add_mismatched(batch, found)

    swapped = as_responses(batch)
    assert swapped.lengths("response").tolist() == [1, 2, 0]
    assert swapped.flat("prompt_ids").tolist() == [11, 12, 13, 14]
    assert swapped.flat("response_ids").tolist() == [4, 5, 6]

    add_mismatched(batch, {2: answered(batch)[0]})
    swapped = as_responses(batch)
    log_probs = torch.tensor([-0.5, torch.nan, -0.25])
    assert summed(log_probs, swapped).tolist() == pytest.approx([0.0, -0.75, 0.0])
