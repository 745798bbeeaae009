"""Runs the checks of a worker at each point of a step where their data is available."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from distflow.algorithms.mismatch import Tolerance, check_mismatch
from distflow.checks.alignment import check_alignment, check_versions
from distflow.checks.movement import LossTerms, Movement
from distflow.checks.nonfinite import NonFinite
from distflow.data.batch import Batch
from distflow.errors import TrustError
from distflow.models.weight_checks import magnitudes
from distflow.runtime.resources import Resources
from distflow.runtime.spec import Spec
from distflow.training.engine import Collective, TrainEngine

Note = Callable[[str, str], None]
"""(kind, message): reports to the user and the run's events."""


@dataclass
class LiveChecks:
    """The checks of every step. Failures raise TrustError; doubtful findings are noted.

    ratio_limit: mean |log ratio| that the first mini-batch may have against the trainer's own old log-probs.
    movement: by role of the engine. keeps_kv: after a weight sync the engine continues with keys and values of the old
    weights. samples: a node writes the log-probs of sampling; recorded responses have none to compare with.
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
    _warned_at: float = 0.0
    _num_empty: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(spec: Spec, resources: Resources, note: Note) -> "LiveChecks":
        """The checks of a worker."""
        options, trained = spec.options, resources.trained()
        start = {role: magnitudes(engine.state().trained_weights().items()) for role, engine in trained.items()}
        return LiveChecks(
            note,
            spec.tolerance,
            spec.ratio_limit,
            NonFinite(spec.run_dir / "bundles", options.max_skipped, spec.text, start),
            {role: Movement(options.unmoved_after) for role in trained},
            LossTerms(spec.loss_terms),
            spec.data.max_staleness,
            options.on_mismatch == "stop",
            spec.config.actor_rollout_ref.rollout.kv_on_update == "keep",
            any("rollout_log_probs" in node.contract.writes for node in spec.pipeline().nodes),
        )

    def step_taken(self, batch: Batch, step: int, served: int | None) -> None:
        """A step's groups have left the sample queue. served: the last synced weight version, None if nothing
        generates."""
        check_alignment(batch)
        if served is not None:
            check_versions(batch, step, served, self.max_staleness)

    def updated(
        self, role: str, engine: TrainEngine, batch: Batch, metrics: dict[str, float], step: int, first: bool
    ) -> None:
        """An optimizer step was taken or skipped; `first` of its training step."""
        bundle = self.nonfinite.updated(role, engine, batch, metrics, step)
        if bundle is not None:
            self.note("warning", f"an update of the {role} was skipped: loss or gradient is not finite ({bundle})")
        if metrics.get("empty"):
            self._report_empty(role)
        still = self.movement[role].updated(engine, metrics)
        if still:
            self.note("finding", _unmoved(role, still, self.movement[role].after))
        if first and role == "actor" and not metrics.get("skipped"):
            self._check_ratio(batch, metrics)

    def learned(
        self, batch: Batch, metrics: dict[str, float], step: int, reduce: Collective | None = None
    ) -> dict[str, float]:
        """All nodes of a step have run; returns more metrics, over all ranks. Raises TrustError if a node rewrote a
        mask or a group.

        A mismatch is reported when it appears, and each time it has doubled.
        """
        check_alignment(batch)
        found, warning = self._check_mismatch(batch, metrics, step, reduce) if self.samples else ({}, None)
        gap = found.get("mismatch/same_version/mean_abs", 0.0)
        if warning is not None and (not self._warned_at or gap > 2 * self._warned_at):
            self._warned_at = gap
            self.note("warning", warning)
        if "actor/loss" in metrics:
            for name in self.loss_terms.updated(metrics):
                self.note("finding", _dead_term(name, self.loss_terms.after))
        return found

    def _check_mismatch(
        self, batch: Batch, metrics: dict[str, float], step: int, reduce: Collective | None
    ) -> tuple[dict[str, float], str | None]:
        return check_mismatch(
            batch,
            step,
            self.tolerance,
            self.stops_on_mismatch,
            self.keeps_kv,
            weighs=bool(metrics.get("rollout_corr/on")),
            reduce=reduce,
        )

    def _report_empty(self, role: str) -> None:
        """Report empty mini-batches when the first appears, and each time the number has doubled."""
        self._num_empty[role] += 1
        number = self._num_empty[role]
        if number & (number - 1) == 0:
            what = "a mini-batch" if number == 1 else f"{number} mini-batches"
            self.note(
                "warning",
                f"{what} of the {role} had no token that counts (loss_mask is 0 throughout: no scores, or a node or "
                "a rejection masked all): no optimizer step was taken, and the learning rate schedule did not advance",
            )

    def _check_ratio(self, batch: Batch, metrics: dict[str, float]) -> None:
        gap = metrics.get("log_ratio_abs")
        if gap is not None and "old_log_probs" in batch and gap > self.ratio_limit:
            raise TrustError(
                f"before the first update of this step the ratio to the old policy must be 1, but |log ratio| is "
                f"{gap:.3g} on average (limit {self.ratio_limit:g}): tokens, masks or old_log_probs are misaligned"
            )


def _unmoved(role: str, names: list[str], after: int) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{role}: {shown} did not move in {after} updates, or only by weight decay: no gradient reaches it, or the "
        "learning rate is too small for float32"
    )


def _dead_term(name: str, after: int) -> str:
    cause = {
        "actor/loss_term/pg": "all advantages are 0: check whether the samples of a group all get the same reward",
        "actor/loss_term/kl": "the policy does not move from the reference, or kl_loss_coef is 0",
    }.get(name, "its coefficient or its input is 0")
    return f"the loss term {name} is on but was exactly 0 in the first {after} steps: {cause}"
