"""Versions of tokens: published, young enough, never going back within a sample."""

import pytest
import torch

from distflow.checks.alignment import check_versions
from distflow.errors import TrustError
from tests.checks.batches import sampled_batch

STEP, STALENESS = 7, 2
LENGTHS = (5, 1, 4, 6)


def check(*versions: list[int], served: int = STEP) -> None:
    """versions: of the tokens of four samples."""
    batch = sampled_batch()
    batch["versions"] = torch.tensor([version for sample in versions for version in sample])
    check_versions(batch, STEP, served, STALENESS)


def test_tokens_of_every_age_that_is_allowed_pass() -> None:
    check([5, 5, 6, 7, 7], [5], [6, 6, 6, 6], [5, 6, 6, 6, 7, 7])
    check([5, 5, 6, 6, -1], [5], [-1, 6, -1, 6], [5, 6, 6, 6, 6, 6], served=6)


@pytest.mark.parametrize(
    ("sample", "served", "message"),
    [
        ([5, 6, 6, 6, 7, 8], 7, "1 tokens of step 8 are said to be made by weights of version 8, but version 7"),
        ([5, 6, 6, 6, 7, 7], 6, "2 tokens of step 8 are said to be made by weights of version 7, but version 6"),
        ([4, 6, 6, 6, 7, 7], 7, "1 tokens of step 8 were made by weights of version 4, but version 7 was published"),
        ([6, 6, 5, 6, 7, 7], 7, "the versions of sample 1-1 go backwards"),
        ([6, -1, 5, 6, 7, 7], 7, "the versions of sample 1-1 go backwards"),
    ],
)
def test_others_stop_the_run(sample: list[int], served: int, message: str) -> None:
    with pytest.raises(TrustError, match=message):
        check([5] * 5, [5], [6] * 4, sample, served=served)
