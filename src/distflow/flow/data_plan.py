"""What a run draws from its data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataPlan:
    """What a run draws from its data, and when it ends: after `total_tickets` or `total_steps`, what comes first.
    Without `total_tickets` the data go round as often as the steps take.

    group_size: samples a prompt. consumer_batch: prompt groups a step.
    max_staleness: steps by which weights that made a token may be older than the step that trains on it.
    max_concurrent: groups that may run at once, None for as many as staleness allows. max_num_gen_batches: bound on
    the tickets drawn for a step, in batches. max_held_bytes: of groups that wait for their step or are trained on,
    None for no bound.
    """

    num_rows: int
    consumer_batch: int
    group_size: int
    total_tickets: int | None
    total_steps: int
    seed: int = 1
    shuffle: bool = True
    max_staleness: int = 0
    max_concurrent: int | None = None
    max_num_gen_batches: int | None = None
    when_exhausted: Literal["error", "continue"] = "error"
    max_held_bytes: int | None = None

    def __post_init__(self) -> None:
        assert min(self.num_rows, self.consumer_batch, self.group_size) > 0
        assert self.max_num_gen_batches is None or self.max_num_gen_batches > 0
