"""Claim: every token was made by weights that were published, and that are young enough for its step."""

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.runtime.checks import TrustError


def check_versions(batch: Batch, step: int, served: int, max_staleness: int) -> None:
    """served: the step of the weights that were published last before this step.

    Raises TrustError where a token of the policy has a later version, one that is more than `max_staleness` steps
    behind, or one that is older than the token before it.
    """
    versions = batch.flat("versions")
    made = versions >= 0
    ahead, behind = made & (versions > served), made & (versions < step - max_staleness)
    if bool(ahead.any()):
        raise TrustError(
            f"{int(ahead.sum())} tokens of step {step + 1} are said to be made by weights of version "
            f"{int(versions[ahead][0])}, but version {served} was published last: the engine counts ahead of the "
            "weights that it was sent"
        )
    if bool(behind.any()):
        raise TrustError(
            f"{int(behind.sum())} tokens of step {step + 1} were made by weights of version "
            f"{int(versions[behind][0])}, but version {served} was published, and weights may be {max_staleness} steps "
            "old (async.max_staleness): they were not sent, or the engine does not serve them"
        )
    rows = _rows(batch)[made]
    falls = (versions[made].diff() < 0) & (rows.diff() == 0)
    if bool(falls.any()):
        uid = batch["uid"][int(rows[1:][falls][0])]
        raise TrustError(f"the versions of sample {uid} go backwards: the engine went back to older weights")


def _rows(batch: Batch) -> Tensor:
    """The sample of each response token."""
    return torch.arange(len(batch)).repeat_interleave(batch.lengths("response"))
