"""Claim: every token was made by weights that were published, and that are young enough for its step.

Claim: masks, versions, groups and prompts of a batch belong together.
"""

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.errors import TrustError


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


def check_alignment(batch: Batch) -> None:
    """Compare columns that were written by different parts.

    Raises TrustError where response_mask is not exactly on the tokens that carry a version, loss_mask reaches beyond
    it, a rollout log-prob is no log-probability, a sample's group is not its group, or the episodes of a group begin
    with different prompts. (Later samples of an episode may have others: a conversation that branches.)
    """
    _check_mask(batch)
    _check_log_probs(batch)
    _check_groups(batch)


def _check_mask(batch: Batch) -> None:
    made_by_policy = batch.flat("versions") >= 0
    wrong = made_by_policy != (batch.flat("response_mask") > 0)
    if bool(wrong.any()):
        uid, token = _where(batch, wrong)
        raise TrustError(
            f"response_mask is wrong at token {token} of sample {uid}: it must be 1 exactly on tokens that the policy "
            "made. A node shifted or rewrote the mask; training on it would push the wrong tokens. To leave "
            "tokens out of the loss write loss_mask"
        )
    beyond = (batch.flat("loss_mask") > 0) & ~made_by_policy
    if bool(beyond.any()):
        uid, token = _where(batch, beyond)
        raise TrustError(f"loss_mask covers token {token} of sample {uid}, which the policy did not make")


def _check_log_probs(batch: Batch) -> None:
    if "rollout_log_probs" not in batch:
        return
    mask = batch.flat("response_mask") > 0
    values = batch.flat("rollout_log_probs")
    wrong = mask & ~(torch.isfinite(values) & (values <= 1e-3))
    if bool(wrong.any()):
        uid, token = _where(batch, wrong)
        raise TrustError(
            f"rollout_log_probs of sample {uid} is {float(values[wrong][0]):g} at token {token}: no log-probability"
        )


def _check_groups(batch: Batch) -> None:
    prompts: dict[int, tuple[str, torch.Tensor]] = {}
    begun: set[tuple[int, int]] = set()
    ids = batch.flat("prompt_ids").split(batch.lengths("prompt").tolist())
    groups, episodes = batch["group_index"].tolist(), batch["episode_index"].tolist()
    for uid, group, episode, prompt in zip(batch["uid"], groups, episodes, ids, strict=True):
        if int(uid.split("-")[0]) != group:
            raise TrustError(f"sample {uid} carries group_index {group}: a node mixed up groups")
        if (group, episode) in begun:
            continue
        begun.add((group, episode))
        first_uid, first = prompts.setdefault(group, (uid, prompt))
        if not torch.equal(prompt, first):
            raise TrustError(f"the episodes of samples {first_uid} and {uid} are one group but begin differently")


def _where(batch: Batch, wrong: torch.Tensor) -> tuple[str, int]:
    """uid and response position of the first wrong token."""
    position = int(wrong.nonzero()[0])
    ends = batch.lengths("response").cumsum(0)
    row = int((ends <= position).sum())
    return batch["uid"][row], position - int(ends[row] - batch.lengths("response")[row])
