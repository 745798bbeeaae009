"""Columns that do not belong together are refused, with the sample and the token."""

import math

import pytest
import torch

from distflow.checks.invariants import check_alignment
from distflow.data.batch import Batch
from distflow.errors import TrustError
from tests.checks.batches import LENGTHS, sampled_batch


@pytest.mark.parametrize("tool_tokens", [0, 3])
def test_what_a_rollout_leaves_is_aligned(tool_tokens: int) -> None:
    batch = sampled_batch(tool_tokens=tool_tokens)
    check_alignment(batch)
    batch["loss_mask"] = batch["response_mask"] * (torch.arange(4) != 2)[:, None]
    check_alignment(batch)


@pytest.mark.parametrize("tool_tokens", [0, 3])
@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_mask(tool_tokens: int, shift: int) -> None:
    batch = sampled_batch(tool_tokens=tool_tokens)
    mask = torch.nn.functional.pad(batch["response_mask"], (max(shift, 0), max(-shift, 0)))
    batch["response_mask"] = mask[:, :-1] if shift > 0 else mask[:, 1:]
    with pytest.raises(TrustError, match="response_mask .* at token"):
        check_alignment(batch)


def test_the_first_wrong_token_is_named() -> None:
    batch = sampled_batch()
    mask = batch.flat("response_mask").clone()
    mask[LENGTHS[0] + LENGTHS[1] + 2] = 0
    batch["response_mask"] = mask
    with pytest.raises(TrustError, match="at token 2 of sample 1-0"):
        check_alignment(batch)


def test_a_loss_mask_on_tokens_of_a_tool() -> None:
    batch = sampled_batch(tool_tokens=2)
    batch["loss_mask"] = torch.ones_like(batch["response_mask"])
    with pytest.raises(TrustError, match="loss_mask .* token 5 of sample 0-0"):
        check_alignment(batch)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.5])
def test_something_that_is_no_log_probability(value: float) -> None:
    batch = sampled_batch()
    column = batch.flat("rollout_log_probs").clone()
    column[LENGTHS[0]] = value
    batch["rollout_log_probs"] = column

    with pytest.raises(TrustError, match="rollout_log_probs of sample 0-1 .* at token 0"):
        check_alignment(batch)


def test_the_density_of_a_number_of_an_action_may_exceed_1() -> None:
    batch = sampled_batch()
    batch["rollout_log_probs"] = torch.full_like(batch.flat("rollout_log_probs"), 0.5)
    batch["action_values"] = torch.zeros_like(batch.flat("rollout_log_probs"))
    check_alignment(batch)


def test_a_log_probability_of_a_token_that_no_policy_made_is_not_read() -> None:
    batch = sampled_batch(tool_tokens=2)
    column = batch["rollout_log_probs"]
    column[batch["response_mask"] == 0] = math.nan
    batch["rollout_log_probs"] = column
    check_alignment(batch)


def test_swapped_groups_and_prompts() -> None:
    batch = sampled_batch()
    batch["group_index"] = torch.tensor([0, 1, 0, 1])
    with pytest.raises(TrustError, match="sample 0-1 carries group_index 1"):
        check_alignment(batch)
    batch = sampled_batch()
    prompts = batch["prompt_ids"]
    prompts[3, 0] = 0
    batch["prompt_ids"] = prompts

    with pytest.raises(TrustError, match="samples 1-0 and 1-1 .* prompts"):
        check_alignment(batch)


def test_a_later_sample_of_an_episode_may_have_another_prompt() -> None:
    batch = sampled_batch()
    prompts = batch["prompt_ids"]
    prompts[3, 0] = 0
    batch["prompt_ids"] = prompts
    batch["episode_index"] = torch.tensor([0, 1, 1, 1])
    check_alignment(batch)
    batch["group_index"] = torch.tensor([0, 0, 1, 0])
    with pytest.raises(TrustError, match="sample 1-1 carries group_index 0"):
        check_alignment(batch)


def with_likeliest(tool_tokens: int) -> Batch:
    """The drawn token is the likeliest, the second, or none of two, in turn."""
    batch = sampled_batch(tool_tokens=tool_tokens)
    ids = batch.flat("response_ids")
    own = batch.flat("sampling_log_probs")
    place = torch.arange(len(ids)) % 3
    others = torch.stack([ids + 50, ids + 60], dim=1)
    column = torch.arange(2)[None, :] == place[:, None]
    batch["top_ids"] = torch.where(column, ids[:, None], others)
    above = own[:, None] + torch.tensor([0.5, 0.25])
    below = own[:, None] - torch.tensor([0.0, 0.25])
    first = torch.where(place[:, None] == 0, below, above)
    batch["top_log_probs"] = torch.where(column, own[:, None], first)
    return batch


@pytest.mark.parametrize("tool_tokens", [0, 3])
def test_likeliest_tokens_agree_with_their_draws(tool_tokens: int) -> None:
    batch = with_likeliest(tool_tokens)
    check_alignment(batch)
    given = batch.flat("response_mask") == 0
    for name, value in (("top_ids", 0), ("top_log_probs", -math.inf)):
        column = batch.flat(name).clone()
        column[given] = value
        batch[name] = column
    check_alignment(batch)


@pytest.mark.parametrize("tool_tokens", [0, 3])
@pytest.mark.parametrize("shift", [1, -1])
def test_likeliest_tokens_of_a_neighbour(tool_tokens: int, shift: int) -> None:
    batch = with_likeliest(tool_tokens)
    for name in ("top_ids", "top_log_probs"):
        batch[name] = batch.flat(name).roll(shift, dims=0)
    with pytest.raises(TrustError, match="top_ids of sample 0-0"):
        check_alignment(batch)


def test_likeliest_tokens_of_another_sample() -> None:
    batch = with_likeliest(0)
    order = [0, 1, 3, 2]
    swapped = torch.cat([batch.flat("top_ids").split(list(LENGTHS))[row] for row in order])
    batch["top_ids"] = swapped
    with pytest.raises(TrustError, match="top_ids of sample 1-0"):
        check_alignment(batch)
