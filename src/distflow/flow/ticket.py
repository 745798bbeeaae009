"""Tickets name the prompt groups of a run; versions name the weights that produced their tokens."""

from dataclasses import dataclass

TRAIN = "train"


@dataclass(frozen=True, order=True)
class Version:
    """Weights as of the end of a step, ordered lexicographically: each resume raises the incarnation."""

    incarnation: int
    step: int


@dataclass(frozen=True)
class Ticket:
    """The identity of one prompt group: numbered globally, independent of the number of workers.

    number: position in the run's data order, from 0.
    epoch, row: which row of the data set, in which pass over it.
    group_size: samples to draw for the prompt.
    version: the step whose weights were served when the ticket was issued.
    attempt: raised each time that the group starts again, after a crash or because it was aborted.
    stream: "train", "train/<domain>", or "val/<set>".
    position: in the order of its domain, from 0; 0 of a run without domains, where `number` says it.
    """

    number: int
    epoch: int
    row: int
    group_size: int
    version: int
    attempt: int = 0
    stream: str = TRAIN
    position: int = 0


def stream_of(domain: str) -> str:
    """What a training ticket of the domain has; "" is that of a run without."""
    return f"{TRAIN}/{domain}" if domain else TRAIN


def domain_of(stream: str) -> str:
    """The inverse."""
    return stream.partition("/")[2]
