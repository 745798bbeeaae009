"""What a worker asks of the world around its process: protocols, and one file for each wire that implements one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distflow.runtime.ports.edge import EdgePort
from distflow.runtime.ports.exchange import ExchangePort
from distflow.runtime.ports.intake import IntakePort
from distflow.runtime.ports.weights import WeightPort
from distflow.training.collective import Collective

if TYPE_CHECKING:
    from distflow.runtime.validation import Answers


@dataclass(frozen=True)
class Ports:
    """The ports of one worker. collective: of the ranks that learn the same. data: of those among them that have
    samples of their own, one for each share of a step. everyone: of all that learn. intake: for a training loop of the
    user's own, where the edge is of this process. abort: tells every other part of the run that this one is gone.
    validate: has the workers answer held-out prompts that have an engine, for one that has none. exchange: None where
    no column goes from team to team."""

    edge: EdgePort
    intake: IntakePort | None
    weights: WeightPort
    collective: Collective
    data: Collective
    everyone: Collective
    abort: Callable[[BaseException], None]
    validate: "Callable[[int], Sequence[Answers]]" = lambda step: ()
    exchange: ExchangePort | None = None
