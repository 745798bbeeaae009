"""The checks of every step, at the points of a step where their data is available: the columns of
the batch are consistent, engine and trainer agree, every trained tensor moves, every enabled loss
term contributes, and losses, gradients and weights are finite."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from distflow.algorithms.mismatch_check import Tolerance, check_mismatch
from distflow.checks.movement import LossTerms, Movement
from distflow.checks.nonfinite import NonFinite
from distflow.data.batch import Batch, repeated
from distflow.errors import TrustError
from distflow.models.weight_soundness import magnitudes
from distflow.runtime.resources import Resources
from distflow.runtime.spec import Spec
from distflow.training.engine import Collective, TrainEngine

_ROUNDING = 1e-3
"""Of the log-prob of a token, computed twice from the same logits."""

DEAD_TERMS = {
    "actor/loss_term/pg": (
        "all advantages are 0: check whether the samples of a group all get the same reward"
    ),
    "actor/loss_term/kl": "the policy does not differ from the reference, or kl_loss_coef is 0",
    "actor/loss_term/teacher": "the policy is its own teacher: choose another distill.teacher.path",
    "actor/loss_term/ce": "no response is correct, or the policy is certain of all tokens",
}
"""Reasons for a loss term to be exactly 0."""

Note = Callable[[str, str], None]
"""(kind, message): reports to the user and the run's events."""


@dataclass
class Invariants:
    """The checks of every step of a worker.

    ratio_limit: mean |log ratio| that the first mini-batch may have against the trainer's own old
    log-probs. movement: by role of the engine. keeps_kv: whether the engine keeps keys and values
    of the old weights after a weight sync. samples: whether a node writes the sampling log-probs;
    recorded responses have none. same_prompts: whether all episodes of a group begin with the row's
    prompt; a workflow may write its own.
    """

    note: Note
    tolerance: Tolerance
    ratio_limit: float
    nonfinite: NonFinite
    movement: dict[str, Movement]
    loss_terms: LossTerms
    max_staleness: int = 0
    stops_on_mismatch: bool = False
    keeps_kv: bool = True
    samples: bool = True
    same_prompts: bool = True
    _warned_at: float = 0.0
    _empty: set[str] = field(default_factory=set)
    """Roles of which an empty mini-batch was reported."""

    @staticmethod
    def of(spec: Spec, resources: Resources, note: Note) -> "Invariants":
        """The checks of a worker."""
        trust = spec.config.trust
        trained = resources.updated()
        start = {
            role: magnitudes(engine.state().trained_weights().items())
            for role, engine in trained.items()
        }

        return Invariants(
            note,
            spec.tolerance,
            spec.ratio_limit,
            NonFinite(spec.run_dir / "bundles", trust.max_skipped_updates, spec.text, start),
            {role: Movement(trust.unmoved_after) for role in trained},
            LossTerms(spec.loss_terms),
            spec.data.max_staleness,
            trust.on_mismatch == "stop",
            spec.config.actor_rollout_ref.rollout.kv_on_update == "keep",
            any("rollout_log_probs" in node.contract.writes for node in spec.pipeline().nodes),
            spec.config.actor_rollout_ref.rollout.workflow is None,
        )

    def step_taken(self, batch: Batch, step: int, synced_version: int | None) -> None:
        check_alignment(batch, self.same_prompts)
        if synced_version is not None:
            check_versions(batch, step, synced_version, self.max_staleness)
        check_whole(batch)

    def updated(
        self,
        role: str,
        engine: TrainEngine,
        batch: Batch,
        metrics: dict[str, float],
        step: int,
        first: bool,
    ) -> None:
        bundle = self.nonfinite.updated(role, engine, batch, metrics, step)
        if bundle is not None:
            self.note(
                "warning",
                f"an update of the {role} was skipped: loss or gradient is not finite ({bundle})",
            )

        if metrics.get("empty") and role not in self._empty:
            self._empty.add(role)
            self.note(
                "warning",
                f"a mini-batch of the {role} had no token in the loss (no scores, no pair because "
                "all rewards of each group were equal, or a node or a rejection set loss_mask to 0 "
                "everywhere): no optimizer step was taken, and the learning rate schedule did not "
                "advance",
            )

        still = self.movement[role].updated(engine, metrics)
        if still:
            more = f" and {len(still) - 5} more" if len(still) > 5 else ""
            self.note(
                "finding",
                f"{role}: {', '.join(map(repr, still[:5]))}{more} did not change in "
                f"{self.movement[role].after} updates, or only by weight decay: it gets no "
                "gradient, or the learning rate is too small",
            )

        gap = metrics.get("log_ratio_abs", 0.0)
        is_first = (
            first and role != "critic" and not metrics.get("skipped") and "old_log_probs" in batch
        )
        if is_first and gap > self.ratio_limit:
            raise TrustError(
                "before the first update of this step the ratio to the old policy must be 1, but "
                f"|log ratio| is {gap:.3g} on average (limit {self.ratio_limit:g}): tokens, masks "
                "or old_log_probs are misaligned"
            )

    def step_trained(
        self, batch: Batch, metrics: dict[str, float], step: int, reduce: Collective | None = None
    ) -> dict[str, float]:
        """A mismatch is reported when it appears, and each time it has doubled."""
        check_alignment(batch, self.same_prompts)
        found = dict[str, float]()
        warning = None
        if self.samples:
            found, warning = check_mismatch(
                batch, step, self.tolerance, self.stops_on_mismatch, self.keeps_kv, reduce
            )

        gap = found.get("mismatch/same_version/mean_abs", 0.0)
        if warning is not None and (not self._warned_at or gap > 2 * self._warned_at):
            self._warned_at = gap
            self.note("warning", warning)

        if "actor/loss" in metrics:
            for name in self.loss_terms.updated(metrics):
                cause = DEAD_TERMS.get(name, "its coefficient or its input is 0")
                message = f"is on but was exactly 0 in the first {self.loss_terms.after} steps"
                self.note("finding", f"the loss term {name} {message}: {cause}")

        return found


def check_versions(batch: Batch, step: int, synced: int, max_staleness: int) -> None:
    """synced: the last weight version synced before this step.

    Raises TrustError if a token of the policy has a later version, is more than `max_staleness`
    steps stale, or has an older version than the token before it in its conversation.
    """
    versions = batch.flat("versions").cpu().numpy()
    of_policy = versions >= 0
    too_new = versions > synced
    too_old = of_policy & (versions < step - max_staleness)

    if too_new.any():
        raise TrustError(
            f"{int(too_new.sum())} tokens of step {step + 1} are marked with weight version "
            f"{int(versions[too_new][0])}, but version {synced} was synced last: the engine's "
            "version is ahead of the weights that it received"
        )
    if too_old.any():
        raise TrustError(
            f"{int(too_old.sum())} tokens of step {step + 1} were generated by weights of version "
            f"{int(versions[too_old][0])}, but version {synced} was synced, and weights may be "
            f"{max_staleness} steps old (async.max_staleness): they were not sent, or are not used "
            "by the engine"
        )

    own = versions[of_policy]
    if not (falls := np.diff(own) < 0).any():
        return

    lengths = batch.conversation_lengths()
    talks = repeated(torch.arange(len(lengths)), lengths)[batch.response_positions()].numpy()[
        of_policy
    ]
    if (falls := falls & (np.diff(talks) == 0)).any():
        rows = batch.rows().numpy()[of_policy]
        uid = batch["uid"][int(rows[1:][falls][0])]
        raise TrustError(
            f"the versions of sample {uid} go backwards: the engine went back to older weights"
        )


def check_whole(batch: Batch) -> None:
    """Raises TrustError for a sample whose generation was aborted."""
    if "finish_reason" in batch and "abort" in batch["finish_reason"]:
        uid = batch["uid"][batch["finish_reason"].index("abort")]
        raise TrustError(
            f"sample {uid} is a part of a response: a weight update has aborted its generation "
            "(rollout.kv_on_update=abort), and it was not generated again"
        )


def check_alignment(batch: Batch, same_prompts: bool = True) -> None:
    """Compare columns written by different parts of the system.

    Raises TrustError if response_mask does not match the tokens that carry a version, loss_mask
    extends beyond it, a rollout log-prob is not a log-probability, a sample's group_index is not
    its group's, or the episodes of a group begin with different prompts. (Further conversations may
    have other prompts.)
    """
    made_by_policy = batch.flat("versions").cpu().numpy() >= 0
    mask = batch.flat("response_mask").cpu().numpy() > 0
    if found := _first(batch, made_by_policy != mask):
        raise TrustError(
            f"response_mask is wrong at token {found[1]} of sample {found[0]}: it must be 1 "
            "exactly on tokens that the policy generated. A node shifted or rewrote the mask; "
            "training would update the wrong tokens. To exclude tokens from the loss, write "
            "loss_mask"
        )
    if found := _first(batch, (batch.flat("loss_mask").cpu().numpy() > 0) & ~made_by_policy):
        raise TrustError(
            f"loss_mask covers token {found[1]} of sample {found[0]}, which the policy did not "
            "generate"
        )

    if "rollout_log_probs" in batch:
        values = batch.flat("rollout_log_probs").cpu().numpy()

        # the density of a number may exceed 1
        highest = np.inf if "action_values" in batch else 1e-3

        wrong = mask & ~(np.isfinite(values) & (values <= highest))
        if found := _first(batch, wrong):
            raise TrustError(
                f"rollout_log_probs of sample {found[0]} is {float(values[wrong][0]):g} at token "
                f"{found[1]}, which is not a log-probability"
            )

    if "top_ids" in batch:
        _check_likeliest(batch, mask)
    _check_groups(batch, same_prompts)


def _check_likeliest(batch: Batch, mask: NDArray[np.bool_]) -> None:
    """Raises TrustError if the sampler's likeliest tokens are of another draw than their token."""
    is_drawn = (batch.flat("top_ids") == batch.flat("response_ids")[:, None]).cpu().numpy()
    log_probs = batch.flat("top_log_probs").cpu().numpy()
    own = batch.flat("sampling_log_probs").cpu().numpy()
    # a token that is not among them is less likely than all of them
    expected = np.where(is_drawn, log_probs, -np.inf).max(-1)
    least = log_probs.min(-1)
    wrong = np.where(is_drawn.any(-1), np.abs(own - expected) > _ROUNDING, own > least + _ROUNDING)
    if found := _first(batch, wrong & mask):
        raise TrustError(
            f"top_ids of sample {found[0]} are of another draw than token {found[1]}: their "
            "log-probs are not consistent with its own. A node moved tokens without these columns"
        )


def _check_groups(batch: Batch, same_prompts: bool) -> None:
    prompts: dict[int, tuple[str, bytes]] = {}
    episodes_seen: set[tuple[int, int]] = set()
    ids = batch.flat("prompt_ids").cpu().numpy()
    raw = ids.tobytes()
    ends = (batch.lengths("prompt").cumsum(0) * ids.itemsize).tolist()
    groups = batch["group_index"].tolist()

    episodes = batch["episode_index"].tolist()
    for uid, group, episode, start, end in zip(
        batch["uid"], groups, episodes, [0, *ends], ends, strict=False
    ):
        if int(uid.partition("-")[0]) != group:
            raise TrustError(
                f"sample {uid} carries group_index {group}: a node mixed up the groups"
            )
        if (group, episode) in episodes_seen:
            continue

        episodes_seen.add((group, episode))
        first_uid, first = prompts.setdefault(group, (uid, raw[start:end]))
        if same_prompts and raw[start:end] != first:
            raise TrustError(
                f"the episodes of samples {first_uid} and {uid} are one group but differ in their "
                "prompts"
            )


def _first(batch: Batch, wrong: NDArray[np.bool_]) -> tuple[str, int] | None:
    """uid and response position of the first wrong token, None if there is none."""
    if not wrong.any():
        return None
    position = int(wrong.argmax())
    ends = batch.lengths("response").cumsum(0)
    row = int((ends <= position).sum())
    return batch["uid"][row], position - int(ends[row] - batch.lengths("response")[row])
