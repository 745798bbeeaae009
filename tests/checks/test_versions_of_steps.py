"""Versions of tokens: synced, not too stale, never decreasing within a sample."""

import pytest
import torch

from distflow.checks.invariants import check_versions
from distflow.errors import TrustError
from tests.checks.batches import sampled_batch

STEP = 7
STALENESS = 2


def check(*versions: list[int], synced: int = STEP) -> None:
    """versions: of the tokens of four samples."""
    batch = sampled_batch()
    batch["versions"] = torch.tensor([version for sample in versions for version in sample])
    check_versions(batch, STEP, synced, STALENESS)


def test_tokens_of_every_age_that_is_allowed_pass():
    check([5, 5, 6, 7, 7], [5], [6, 6, 6, 6], [5, 6, 6, 6, 7, 7])
    check([5, 5, 6, 6, -1], [5], [-1, 6, -1, 6], [5, 6, 6, 6, 6, 6], synced=6)


@pytest.mark.parametrize(
    ("sample", "synced", "message"),
    [
        (
            [5, 6, 6, 6, 7, 8],
            7,
            "1 tokens of step 8 .* version 8, .* version 7",
        ),
        (
            [5, 6, 6, 6, 7, 7],
            6,
            "2 tokens of step 8 .* version 7, .* version 6",
        ),
        (
            [4, 6, 6, 6, 7, 7],
            7,
            "1 tokens of step 8 .* version 4, .* version 7 ",
        ),
        ([6, 6, 5, 6, 7, 7], 7, "versions of sample 1-1 "),
        ([6, -1, 5, 6, 7, 7], 7, "versions of sample 1-1 "),
    ],
)
def test_others_stop_the_run(sample, synced, message):
    with pytest.raises(TrustError, match=message):
        check([5] * 5, [5], [6] * 4, sample, synced=synced)
