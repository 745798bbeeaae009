"""Which tokens an off-policy mask drops, by hand; its effect on a loss is tested with the
objective."""

import math

import torch

from distflow.algorithms.rollout_correction import off_policy_sequence_mask


def test_by_hand() -> None:
    log_probs = torch.tensor(
        [[-1.0, -3.0, math.nan], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]
    ).requires_grad_()
    rollout = torch.tensor([[-1.0, -2.0, math.inf], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]])
    advantages = torch.tensor([[-1.0, 0.0, math.nan], [-1.0, -1.0, -1.0], [1.0, -1.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    # The means of log π_rollout − log π are 0.5, 0 and 1; an advantage of 0 is not negative.
    kept = off_policy_sequence_mask(log_probs, rollout, advantages, mask, 0.4)
    assert kept.tolist() == [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]
    assert not kept.requires_grad
    at_the_bound = off_policy_sequence_mask(log_probs, rollout, advantages, mask, 0.5)
    assert at_the_bound[0].tolist() == [1.0, 1.0, 1.0]
    assert off_policy_sequence_mask(*[torch.zeros(0, 0)] * 4, 0.5).shape == (0, 0)
