"""What rollout and training loop did and waited for, from a run's spans and ledger."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.observe.crash_safe_files import bytes_left_out
from distflow.observe.run_reader import read_spans, span_files
from distflow.observe.writing.run_folder import Span

TRAINING = "train"
"""The name of spans of decoding for training."""

_STEP = re.compile(r"step (\d+)")


@dataclass(frozen=True)
class RunActivity:
    """spans: by side. cut: the actors of whose files only the end was read."""

    spans: Mapping[str, Sequence[Span]]
    cut: frozenset[str]

    def waited(self, start: float, end: float) -> float:
        """The seconds that the trainer waited for groups."""
        return _covered(
            (
                s
                for s in self.spans.get("training", ())
                if s.kind == "wait" and _STEP.fullmatch(s.what)
            ),
            start,
            end,
        )

    def decoded(self, start: float, end: float) -> float:
        """The seconds in which an engine decoded for training; the mean over several engines."""
        decoding = [[s for s in part if s.kind == "decode"] for part in self.spans.values()]
        engines = [[s for s in spans if s.what == TRAINING] for spans in decoding if spans]
        return sum(_covered(spans, start, end) for spans in engines) / max(len(engines), 1)

    def scored(self, start: float, end: float) -> float:
        """The seconds in which a group waited for its scores; the mean over several workers."""
        scores = [[s for s in part if s.what == "scores"] for part in self.spans.values()]
        return sum(_covered(spans, start, end) for spans in scores if spans) / max(
            sum(map(bool, scores)), 1
        )


def read_activity(run_dir: Path, max_bytes: int = 3_000_000) -> RunActivity:
    """The activity of as much of the run as its files' ends hold. max_bytes: see `span_files`."""
    spans, (paths, each) = read_spans(run_dir, max_bytes), span_files(run_dir, max_bytes)
    cut = frozenset(
        path.stem for path in paths if path.stem in spans and bytes_left_out(path, each)
    )
    return RunActivity(spans, cut)


def _covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds of a stretch of time that spans cover, counting overlaps once."""
    total = 0.0
    until = start
    for span in sorted(spans, key=lambda span: span.start):
        total += max(min(span.end, end) - max(span.start, until), 0.0)
        until = max(until, span.end)
    return total
