"""Splits a step into mini-batches, one optimizer step each: decided globally, the same for any number of ranks."""

from collections.abc import Sequence

from distflow.flow.order import MINI_BATCHES, keyed_permutation


def minibatches(
    num_samples: int, groups: Sequence[int] | None, mini_batch_prompts: int, seed: int, step: int, epoch: int
) -> list[list[int]]:
    """Sample indices of each mini-batch of `mini_batch_prompts` prompt groups; the last may be short.

    groups: the group of each sample, over samples in the order of their tickets, which must not depend on who
    produced them; None where each sample is a group of its own.
    epoch: the pass of the update over this step's samples, from 0. The order of the groups is drawn from
    (seed, step, epoch); groups stay whole, and indices ascend within a mini-batch.
    """
    if mini_batch_prompts < 1:
        raise ValueError(f"mini_batch_prompts must be at least 1, not {mini_batch_prompts}")
    assert groups is None or len(groups) == num_samples
    members: dict[int, list[int]] = {}
    for sample in range(num_samples):
        members.setdefault(sample if groups is None else int(groups[sample]), []).append(sample)
    in_ticket_order = list(members.values())
    order = keyed_permutation(len(in_ticket_order), seed, MINI_BATCHES, step, epoch)
    return [
        sorted(sample for group in order[start : start + mini_batch_prompts] for sample in in_ticket_order[group])
        for start in range(0, len(order), mini_batch_prompts)
    ]
