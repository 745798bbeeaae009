"""What rollout and training loop did and waited for, from a run's spans."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from distflow.observe.run_reader import read_spans, span_files
from distflow.observe.writing.run_folder import Span

Interval = tuple[float, float]
"""Begin and end, in seconds since the epoch."""

TRAINING = "train"
"""The name of spans of decoding for training."""


@dataclass(frozen=True)
class RunActivity:
    spans: Mapping[str, Sequence[Span]]
    """By actor, such as "training-1"."""

    cut: frozenset[str]
    """The actors of whose files only the end was read."""

    def decoded(self, start: float, end: float) -> float:
        """The seconds in which an engine decoded for training; the mean over several engines."""
        return self._seconds("decode", TRAINING, start, end)

    def scored(self, start: float, end: float) -> float:
        """The seconds in which a group waited for its scores; the mean over several workers."""
        return self._seconds("wait", "scores", start, end)

    def _seconds(self, kind: str, what: str, start: float, end: float) -> float:
        """The mean over the actors that have such spans; 0 without one."""
        seconds = []
        for spans in self.spans.values():
            own = [(s.start, s.end) for s in spans if s.kind == kind and s.what == what]
            if own:
                seconds.append(covered(own, start, end))
        return sum(seconds) / max(len(seconds), 1)


def read_activity(run_dir: Path, max_bytes: int = 3_000_000) -> RunActivity:
    """The activity of as much of the run as its files' ends hold. max_bytes: see `span_files`."""
    paths, most = span_files(run_dir, max_bytes)
    spans = read_spans(run_dir, max_bytes)
    cut = {path.stem for path in paths if path.stem in spans and path.stat().st_size > most}
    return RunActivity(spans, frozenset(cut))


def covered(intervals: Iterable[Interval], start: float = -inf, end: float = inf) -> float:
    """The seconds from `start` to `end` that intervals cover, counting overlaps once."""
    total = 0.0
    done_until = start
    for begin, until in sorted(intervals):
        total += max(min(until, end) - max(begin, done_until), 0.0)
        done_until = max(done_until, until)
    return total
