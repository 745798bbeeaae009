"""What a run draws from its data."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from distflow.scheduling.curriculum import CurriculumPlan, SkipPlan


@dataclass(frozen=True)
class DomainPlan:
    """A domain that is drawn from. weight: relative to the others', above 0, taken as the decimal that it is written
    as. group_size: samples a prompt, None for those of the run."""

    name: str
    num_rows: int
    weight: float = 1.0
    group_size: int | None = None


@dataclass(frozen=True)
class DataPlan:
    """What a run draws from its data, and when it ends: after `total_groups` or `total_steps`, what comes first.
    Without `total_groups` the data go round as often as the steps take.

    group_size: samples a prompt. consumer_batch: prompt groups a step.
    max_staleness: steps by which weights that made a token may be older than the step that trains on it.
    max_concurrent: groups that may run at once, None for as many as staleness allows. max_num_gen_batches: bound on
    the groups drawn for a step, in batches. oversampling: groups that run besides those that a step lacks, as a part
    of these; at staleness 0 alone. max_held_bytes: of groups that wait for their step or are trained on, None for no
    bound. domains: in the order of their rows, none for one source; each goes round by itself, so that with them
    `total_groups` is None. curriculum: how their shares change, None where they stay. skips: which rows are passed
    over, None for none.
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
        """The domains, or the one source that there is, without a name."""
        return self.domains or (DomainPlan("", self.num_rows),)

    @property
    def shares(self) -> Sequence[Fraction]:
        """Of each source, exact, 1 in all."""
        weights = [Fraction(str(source.weight)) for source in self.sources]
        return [weight / sum(weights) for weight in weights]
