"""The present and future shares of a run's domains: their slots, and the curriculum that changes them."""

from collections.abc import Mapping
from fractions import Fraction

from distflow.scheduling.curriculum import Accuracy, Curriculum, SavedCurriculum
from distflow.scheduling.data_plan import DataPlan
from distflow.scheduling.domain_quotas import Quotas
from distflow.scheduling.ledger_record import Quota
from distflow.scheduling.snapshot import SavedShares, Snapshot


class DomainShares:
    """quotas: which domain each slot belongs to. figures: share and accuracy of each domain at the last release; empty
    if shares stay. A run without domains has one source, with all slots."""

    def __init__(self, plan: DataPlan, start: Snapshot) -> None:
        self._plan = plan
        self.figures: Mapping[str, Mapping[str, float]] = {}
        changes = start.get("shares", []) if plan.curriculum else []
        before = start.get("domains", {})
        self.quotas = Quotas(
            plan.consumer_batch,
            start["step"],
            self._in_order(changes[0]) if changes else plan.shares,
            [Fraction(before[source.name]["lag"]) for source in plan.sources] if before else None,
        )
        for change in changes[1:]:
            self.quotas.change(change["step"] - 1, self._in_order(change))
        self._curriculum = None
        if plan.curriculum:
            weights = {domain.name: domain.weight for domain in plan.domains}
            self._curriculum = Curriculum(plan.curriculum, weights, start.get("curriculum"))

    def record(self, domain: str, accuracy: Accuracy) -> None:
        """Count the responses to a row of the domain."""
        if self._curriculum:
            self._curriculum.count(domain, accuracy)

    def change(self, step: int) -> SavedShares | None:
        """Before the step is consumed: new shares for the first step for which no group can have been issued yet, None
        if they are not due. Raises UserError if the curriculum fails."""
        if not self._curriculum:
            return None
        changes = self.quotas.changes
        domains = zip(self._plan.domains, changes[0][1], strict=True)
        self.figures = figures = {domain.name: {"share": float(share)} for domain, share in domains}
        if self._plan.curriculum is None or (step + 1) % self._plan.curriculum.every:
            return None
        shares, known = self._curriculum.shares(step + 1, changes[-1][1])
        for name, progress in known.items():
            measured = {"accuracy": progress.accuracy, "learnability": progress.learnability}
            figures[name] |= {what: value for what, value in measured.items() if value is not None}
        self.quotas.change(step + 1 + self._plan.max_staleness, shares)
        return self.saved_shares()[-1]

    @property
    def curriculum(self) -> SavedCurriculum | None:
        """State of the curriculum for a snapshot; None if shares stay."""
        return self._curriculum.saved_curriculum() if self._curriculum else None

    def saved_shares(self) -> list[SavedShares]:
        """The shares of the next step and of later changes."""
        names = [source.name for source in self._plan.sources]
        return [
            {"step": step + 1, "shares": {name: str(share) for name, share in zip(names, shares, strict=True)}}
            for step, shares in self.quotas.changes
        ]

    def lags(self) -> dict[str, str]:
        """Lag of each domain, as in a snapshot."""
        return {domain.name: str(lag) for domain, lag in zip(self._plan.domains, self.quotas.lags, strict=True)}

    def shown(self) -> dict[str, Quota]:
        """Share and lag of each domain, as in a record."""
        shares = dict(zip(self.lags(), self.quotas.changes[0][1], strict=True))
        return {name: {"share": str(shares[name]), "lag": lag} for name, lag in self.lags().items()}

    def _in_order(self, saved: SavedShares) -> list[Fraction]:
        return [Fraction(saved["shares"][source.name]) for source in self._plan.sources]
