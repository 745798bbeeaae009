"""The data plan: what a run draws from its data, in which sizes, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from distflow.scheduling.curriculum import CurriculumPlan, SkipPlan


@dataclass(frozen=True)
class DomainPlan:
    """A domain that is drawn from. weight: relative to the others', above 0, read as an exact decimal. group_size:
    samples per prompt, None for the run's."""

    name: str
    num_rows: int
    weight: float = 1.0
    group_size: int | None = None


@dataclass(frozen=True)
class DataPlan:
    """What a run draws from its data, and when it ends: after `total_groups` or `total_steps`, whichever comes first.
    Without `total_groups` the data are repeated as often as the steps need.

    group_size: samples per prompt. consumer_batch: prompt groups per step.
    max_staleness: largest age of a token's weights in steps when it is trained on.
    max_concurrent: groups that may run at once, None for as many as staleness allows. max_num_gen_batches: generation
    budget of a step, in batches. oversampling: extra groups that run, as a fraction of those that the step lacks; only
    at staleness 0. max_held_bytes: of groups that wait for their step or are trained on, None for no bound. domains: in
    the order of their rows, none for one source; each repeats by itself, so that with them `total_groups` is None.
    curriculum: how their shares change, None if they stay. skips: which rows are skipped, None for none.
    """

    num_rows: int
    consumer_batch: int
    group_size: int
    total_groups: int | None
    total_steps: int
    seed: int = 1
    shuffle: bool = True
    max_staleness: int = 0
    max_concurrent: int | None = None
    max_num_gen_batches: int | None = None
    when_exhausted: Literal["error", "continue"] = "error"
    oversampling: Fraction = Fraction(0)
    max_held_bytes: int | None = None
    domains: tuple[DomainPlan, ...] = ()
    curriculum: CurriculumPlan | None = None
    skips: SkipPlan | None = None

    def __post_init__(self) -> None:
        if self.domains:
            assert self.total_groups is None and sum(domain.num_rows for domain in self.domains) == self.num_rows
        assert min(self.num_rows, self.consumer_batch, self.group_size) > 0
        assert self.max_num_gen_batches is None or self.max_num_gen_batches > 0
        assert self.oversampling >= 0 and not (self.oversampling and self.max_staleness)

    @property
    def sources(self) -> tuple[DomainPlan, ...]:
        """The domains, or the only source, without a name."""
        return self.domains or (DomainPlan("", self.num_rows),)

    @property
    def shares(self) -> Sequence[Fraction]:
        """Share of each source, exact; they sum to 1."""
        weights = [Fraction(str(source.weight)) for source in self.sources]
        return [weight / sum(weights) for weight in weights]
