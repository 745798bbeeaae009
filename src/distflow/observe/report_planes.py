"""What the two planes of a run did, from the spans and the ledger of its folder."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.observe.jsonlines import read_records
from distflow.observe.run_reader import Span, read_spans

TRAINING = "train"
"""What spans of decoding for training are called."""

_MAX_LEDGER_BYTES = 8_000_000
_STEP = re.compile(r"step (\d+)")


@dataclass(frozen=True)
class Planes:
    """spans: by actor. trained_at: the step (from 0) that trained on a ticket. oldest: the lowest version of a token of
    a ticket's group. taken: when a step was taken off the experience edge. decodes: whether decoding was recorded."""

    spans: Mapping[str, Sequence[Span]]
    trained_at: Mapping[int, int]
    oldest: Mapping[int, int]
    taken: Mapping[int, float]
    decodes: bool

    def staleness(self, group: Span) -> int | None:
        """Steps between the oldest weights that drew a token of a group (or those that it began with, where that is
        not known) and the step that trained on it; None where none did, or on another attempt."""
        if group.ticket is None or group.ticket not in self.trained_at or group.what != "complete":
            return None
        version = self.oldest.get(group.ticket, group.version)
        return None if version is None else self.trained_at[group.ticket] - version

    def waited(self, start: float, end: float) -> float:
        """The seconds that the learner waited for groups."""
        return _covered(
            (s for s in self.spans.get("learner", ()) if s.kind == "wait" and _STEP.fullmatch(s.what)), start, end
        )

    def decoded(self, start: float, end: float) -> float:
        """The seconds in which an engine decoded for training; of several engines their mean."""
        decoding = [[s for s in part if s.kind == "decode"] for part in self.spans.values()]
        engines = [[s for s in spans if s.what == TRAINING] for spans in decoding if spans]
        return sum(_covered(spans, start, end) for spans in engines) / max(len(engines), 1)

    def ran(self, start: float, end: float) -> float:
        """The seconds in which the run went on, without those of validations and saves, when neither plane is to
        work."""
        phases = [s for s in self.spans.get("learner", ()) if s.kind == "phase"]
        idle = (s for s in phases if s.what in ("eval", "save", "save_wait"))
        return _covered(phases, start, end) - _covered(idle, start, end)


def read_planes(run_dir: Path) -> Planes:
    """Of as much of the run as the ends of its files hold."""
    spans = read_spans(run_dir)
    waits = [s for s in spans.get("learner", ()) if s.kind == "wait"]
    taken = {int(found[1]): span.end for span in waits if (found := _STEP.fullmatch(span.what))}
    trained_at, oldest = dict[int, int](), dict[int, int]()
    for record in read_records(run_dir / "ledger.jsonl", _MAX_LEDGER_BYTES)[0]:
        match record:
            case {"kind": "consumed", "step": int(step), "tickets": list(tickets)}:
                trained_at.update({ticket: step for ticket in tickets if isinstance(ticket, int)})
            case {"kind": "complete", "ticket": int(ticket), "version": int(version)}:
                oldest[ticket] = version
    decodes = any(span.kind == "decode" for part in spans.values() for span in part)
    return Planes(spans, trained_at, oldest, taken, decodes)


def _covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds of a stretch of time that spans cover, those that overlap counted once."""
    total, until = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        total += max(min(span.end, end) - max(span.start, until), 0.0)
        until = max(until, span.end)
    return total
