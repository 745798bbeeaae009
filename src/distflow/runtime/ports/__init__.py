"""What a worker asks of the world around its process: protocols, and one file for each wire that implements one."""

from collections.abc import Callable
from dataclasses import dataclass

from distflow.runtime.ports.edge import EdgePort
from distflow.runtime.ports.weights import WeightPort
from distflow.training.collective import Collective


@dataclass(frozen=True)
class Ports:
    """The ports of one worker. abort: tells every other part of the run that this one is gone."""

    edge: EdgePort
    weights: WeightPort
    collective: Collective
    abort: Callable[[BaseException], None]
