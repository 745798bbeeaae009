"""Claim: every token was made by the weights that were published last."""

from distflow.data.batch import Batch
from distflow.runtime.checks import TrustError


def check_versions(batch: Batch, served: int) -> None:
    """served: the step of those weights. Raises TrustError where a token of the policy has another version."""
    versions = batch.flat("versions")
    wrong = (versions >= 0) & (versions != served)
    if bool(wrong.any()):
        raise TrustError(
            f"{int(wrong.sum())} tokens were made by weights of version {int(versions[wrong][0])}, but version "
            f"{served} was published before they were generated: weights were not sent, or the engine does not serve "
            "them"
        )
