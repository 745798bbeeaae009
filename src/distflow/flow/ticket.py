"""Tickets name the prompt groups of a run; versions name the weights that produced their tokens."""

from dataclasses import dataclass


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
    attempt: raised each time a crash makes the group start again.
    stream: "train", or "val/<set>".
    """

    number: int
    epoch: int
    row: int
    group_size: int
    version: int
    attempt: int = 0
    stream: str = "train"
