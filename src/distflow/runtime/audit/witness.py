"""Records what the engine and the verifiers were asked for a prompt group, and what they answered, as it happens."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from distflow.flow.ticket import Ticket
from distflow.rewards.verdict import Verdict
from distflow.rollout.engine import GenerateRequest, GenerateResult


@dataclass(frozen=True)
class GroupRecord:
    """generated: each request with its result. judged: the verifier's name, its arguments, its verdict."""

    ticket: Ticket
    generated: list[tuple[GenerateRequest, GenerateResult]] = field(default_factory=list)
    judged: list[tuple[str, Mapping[str, object], Verdict]] = field(default_factory=list)


_current: ContextVar[GroupRecord | None] = ContextVar("group_record", default=None)
"""The record of the group whose task is running; tasks that it starts inherit it. None in a validation."""


class Witness:
    """Keeps the records of groups that wait for their step. What it keeps are references to what lives anyhow."""

    def __init__(self) -> None:
        self._kept: dict[int, GroupRecord] = {}

    def begin(self, ticket: Ticket) -> None:
        """From here on the running task works for this ticket's group."""
        _current.set(GroupRecord(ticket))

    def generated(self, request: GenerateRequest, result: GenerateResult) -> None:
        if (record := _current.get()) is not None:
            record.generated.append((request, result))

    def judged(self, name: str, arguments: Mapping[str, object], verdict: Verdict) -> None:
        if (record := _current.get()) is not None:
            record.judged.append((name, arguments, verdict))

    def keep(self) -> None:
        """The running task's group goes to the edge; records of groups that do not are forgotten with their tasks."""
        if (record := _current.get()) is not None:
            self._kept[record.ticket.number] = record

    def take(self, tickets: Iterable[int]) -> dict[int, GroupRecord]:
        """The records of a step's groups, which are no longer kept; none for those of another worker or process."""
        return {number: self._kept.pop(number) for number in tickets if number in self._kept}
