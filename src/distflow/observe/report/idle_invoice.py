"""The idle invoice: what each device of a run did in each second, or for what it waited.

A second is busy, overhead, idle with a cause, down or unknown. The cause is found by walking who
waits for whom, over the recorded spans, until something that does not wait: a trainer waits for the
step's group that ends last, which waits for its reward, and so on. Nothing is counted twice: if a
device trains and decodes at once, it is busy once.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import inf
from typing import NamedTuple

from distflow.errors import count_of
from distflow.observe.crash_safe_files import JSON, to_number
from distflow.observe.report.graph_and_timelines import TRAINING, RunActivity
from distflow.observe.run_reader import Event, Group, MetricsRecord, Timeline
from distflow.observe.writing.run_folder import Span
from distflow.observe.writing.timing import DATA, ENGINE, OTHER_GROUPS, RANKS, REWARDS

KINDS = ("busy", "overhead", "idle", "down", "unknown")
GENERATE = "generate"
TAIL = "long tail"
REWARD = "reward"
NODES = "rollout nodes"
LOADER = "data loader"
UNKNOWN = "unknown"
STUCK = "stuck"
OF_TRAINER = "trainer: "
OF_RANK = "rank "
MOST_UNKNOWN = 0.02

_COMMUNICATION = "communication"
_WAKES = "wake-up"
_BETWEEN = "between phases"
_SYNC = "update_weights"
_TAKES = ("rollout", "data")
_OVERHEAD = {
    *(
        "start",
        "end",
        "audit",
        "check",
        "record",
        "callbacks",
        "save",
        "save_wait",
        "eval",
        "release",
        "exchange",
    ),
    *("profile", _COMMUNICATION, _WAKES, _SYNC, *_TAKES),
}
_SWAPS = ("weights of step", "version number of step")
_STUCK_S = 1.0
"""A cycle of waits that is shorter is one thread that has not woken up yet."""
_GAP_S = 0.1
"""A gap without a span that is shorter is the loop's own work between two phases, or between two
groups."""
_TAIL = 0.1
_MAX_BARS = 200
_MAX_CAUSES = 40
_MAX_CAUSE = 60
_MAX_CUTS = 256
"""In one wait of a device: with more changes among all groups only every n-th is looked at."""
_ACTOR = re.compile(r"(.*?)(?:-(\d{1,6}))?")
_STEP = re.compile(r"(?:release of )?step (\d{1,15})")


class Charge(NamedTuple):
    """Seconds of a device in a step (None: after the last one). cause: what it did, or what it
    waited for."""

    step: int | None
    device: int
    kind: str
    cause: str
    seconds: float


@dataclass(frozen=True)
class Journal:
    """What the invoice needs of a run. spans: by actor. ended: when each step ended, by number.
    windows: the time of each restart that its results survive; the time between is lost. is_over:
    whether the last one has ended. only: the time that is asked for."""

    spans: Mapping[str, Sequence[Span]]
    groups: Sequence[Group]
    ended: Mapping[int, float]
    windows: Sequence[tuple[float, float]]
    is_over: bool = True
    only: tuple[float, float] = (-inf, inf)


class _Piece(NamedTuple):
    start: float
    end: float
    span: Span
    phase: str


class _Line:
    """What one actor does: at each time the span that began last, with the phase around it."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.pieces = list(_innermost(spans))
        self._starts = [piece.start for piece in self.pieces]

    def at(self, t: float) -> _Piece | None:
        place = bisect_right(self._starts, t) - 1
        return self.pieces[place] if place >= 0 and t < self.pieces[place].end else None

    def cuts(self) -> Iterator[float]:
        return (t for piece in self.pieces for t in piece[:2])


def _innermost(spans: Iterable[Span]) -> Iterator[_Piece]:
    running = list[Span]()
    now = -inf
    for span in (*sorted(spans, key=lambda span: (span.start, -span.end)), Span(inf, inf, "", "")):
        while running and now < span.start:
            inner = running[-1]
            if (until := min(inner.end, span.start)) > now:
                yield _Piece(
                    now,
                    until,
                    inner,
                    next((s.what for s in reversed(running) if s.kind == "phase"), ""),
                )
                now = until
            if inner.end <= now:
                running.pop()
        now = span.start
        running.append(span)


def _waits(piece: _Piece) -> bool:
    return piece.span.kind == "wait" and not piece.span.what.startswith(_SWAPS)


def _does(piece: _Piece) -> str:
    return _SYNC if piece.span.kind == "wait" else piece.span.what


class _Groups:
    """The prompt groups that ran, each with the number of its worker."""

    def __init__(self, spans: Iterable[tuple[int, Span]]) -> None:
        self._spans = sorted(spans, key=lambda each: each[1].start)
        self.starts = [span.start for _, span in self._spans]
        self._ends = sorted(span.end for _, span in self._spans)
        self._longest = max((span.end - span.start for _, span in self._spans), default=0.0)

    def running(self, t: float) -> list[tuple[int, Span]]:
        first = bisect_left(self.starts, t - self._longest)
        return [
            each for each in self._spans[first : bisect_right(self.starts, t)] if t < each[1].end
        ]

    def is_tail(self, t: float) -> bool:
        running = bisect_right(self.starts, t) - bisect_right(self._ends, t)
        return 0 < running <= _TAIL * len(self.starts)


class _Actors:
    """What the trainers, engines, rollout loops and groups of a run do."""

    def __init__(self, journal: Journal) -> None:
        self.spans = parts = dict[str, dict[int, list[Span]]]()
        for actor, spans in journal.spans.items():
            if found := _ACTOR.fullmatch(actor):
                parts.setdefault(found[1], {}).setdefault(int(found[2] or 0), []).extend(spans)
        rollout = {
            part: [s for s in spans if s.kind == "wait"]
            for part, spans in parts.get("rollout", {}).items()
        }
        ran = [
            (part, s)
            for part, spans in parts.get("rollout", {}).items()
            for s in spans
            if s.kind == "group"
        ]
        self.training = {part: _Line(spans) for part, spans in parts.get("training", {}).items()}
        self.loops = {
            part: _Line(s for s in spans if s.group_id is None) for part, spans in rollout.items()
        }
        self.devices = sorted({*self.training, *self.loops, *parts.get("engine", {})})
        self.decoding = {
            part: _Line(_decoding(parts.get("engine", {}).get(part, ()), rollout.get(part, ())))
            for part in self.devices
        }
        self.groups = _Groups(ran)
        self.own_groups = {
            part: _Groups(each for each in ran if each[0] == part) for part in rollout
        }
        self.known = dict[tuple[object, ...], str]()
        steps = {group.group_id: group.step for group in journal.groups if group.step is not None}
        by_step: dict[int, list[tuple[int, Span]]] = {}
        for part, span in ran:
            if span.group_id in steps:
                by_step.setdefault(steps[span.group_id], []).append((part, span))
        self.of_step = {step: _Groups(own) for step, own in by_step.items()}
        self.step_of = steps
        domains = {group.group_id: group.domain for group in journal.groups}
        self.domains = domains if len(set(domains.values())) > 1 else {}
        self.group_waits: dict[int | None, list[Span]] = {}
        for span in (
            s
            for name in ("rollout", "reward")
            for spans in parts.get(name, {}).values()
            for s in spans
        ):
            if span.kind == "wait" and span.group_id is not None:
                self.group_waits.setdefault(span.group_id, []).append(span)
        self.has_waits = any(
            span.on == "rollout" for own in parts.get("training", {}).values() for span in own
        )
        self.cuts = sorted(
            {t for each in journal.spans.values() for s in each for t in (s.start, s.end)}
        )


class _Walk:
    """Who waits for whom at one time. The walks return a cause."""

    def __init__(self, actors: _Actors, t: float) -> None:
        # trainers
        self._actors = actors
        self._t = t
        self._seen = set[int]()

    def device(self, part: int) -> tuple[str, str]:
        """Kind and cause of a device."""
        line = self._actors.training.get(part)
        piece = line.at(self._t) if line else None
        engine = self._engine_does(part)
        if piece is not None and not _waits(piece) and piece.span.what not in _TAKES:
            does = _does(piece)
            if does not in _OVERHEAD:
                return "busy", does
            return (
                ("busy", GENERATE) if engine == GENERATE and does != _SYNC else ("overhead", does)
            )
        if engine:
            return "busy" if engine == GENERATE else "overhead", engine
        # of a loop of the user's own, which records no waits
        if piece is not None and piece.span.kind == "phase":
            found = None if self._actors.has_waits else self._critical(None)
            cause = self._of_group(*found) if found else piece.span.what
        else:
            cause = self._of_trainer(part) if piece is not None else self._of_loop(part)
        if cause == UNKNOWN:
            return UNKNOWN, UNKNOWN
        return "overhead" if cause in (
            _COMMUNICATION,
            *_TAKES,
        ) and piece is not None else "idle", cause

    def _engine_does(self, part: int) -> str:
        """Empty if it does nothing."""
        piece = self._actors.decoding[part].at(self._t) if part in self._actors.decoding else None
        if piece is None:
            return ""
        if piece.span.what.startswith(_SWAPS):
            return _SYNC
        return "eval" if piece.span.kind == "decode" and piece.span.what != TRAINING else GENERATE

    def _of_trainer(self, part: int) -> str:
        piece = self._actors.training[part].at(self._t) if part in self._actors.training else None
        if piece is None:
            return UNKNOWN
        if not _waits(piece):
            return f"{OF_TRAINER}{_does(piece)}"
        if part in self._seen:
            return STUCK
        self._seen.add(part)
        if piece.span.on == "rollout":
            found = _STEP.fullmatch(piece.span.what)
            step = int(found[1]) if found else None
            return self._known(("step", step), lambda: self._of_step_wait(step))
        if piece.span.on == RANKS:
            return self._known(("ranks",), lambda: self._of_ranks(part))
        return (
            "checkpoint"
            if piece.span.on == "its writer"
            else piece.span.on or piece.span.what or UNKNOWN
        )

    def _known(self, what: tuple[object, ...], find: Callable[[], str]) -> str:
        """Many devices wait for the same between two changes."""
        key = (bisect_right(self._actors.cuts, self._t), *what)
        if key not in self._actors.known:
            self._actors.known[key] = find()
        return self._actors.known[key]

    def _of_ranks(self, part: int) -> str:
        """Of the rank that the others wait for longest. If all wait for each other, they exchange
        data."""
        others = {
            other: line.at(self._t)
            for other, line in self._actors.training.items()
            if other != part
        }
        late = {
            other: piece
            for other, piece in others.items()
            if piece and not (_waits(piece) and piece.span.on == RANKS)
        }
        if not late:
            return _COMMUNICATION
        last = max(late, key=lambda other: late[other].end)
        if _waits(late[last]):
            return self._of_trainer(last)
        return f"{OF_RANK}{last}: {late[last].phase or _does(late[last])}"

    def _of_step_wait(self, step: int | None) -> str:
        if found := self._critical(step):
            return self._of_group(*found)
        causes = {self._of_loop(part) for part in self._actors.loops}
        return next((cause for cause in (LOADER, STUCK) if cause in causes), UNKNOWN)

    def _of_loop(self, part: int) -> str:
        """Of a rollout loop: of the group of its own that ends last, or of what it waits for."""
        own = (
            self._actors.own_groups[part].running(self._t)
            if part in self._actors.own_groups
            else []
        )
        if own:
            return self._of_group(*max(own, key=lambda each: each[1].end))
        piece = self._actors.loops[part].at(self._t) if part in self._actors.loops else None
        if piece is None:
            return UNKNOWN
        return (
            LOADER
            if piece.span.on == DATA
            else self._of_trainer(min(self._actors.training, default=-1))
        )

    def _critical(self, step: int | None) -> tuple[int, Span] | None:
        """The running group of the step that ends last; of all groups if none of it runs."""
        own = self._actors.of_step.get(step) if step is not None else None
        running = (own.running(self._t) if own else []) or self._actors.groups.running(self._t)
        return max(running, key=lambda each: each[1].end, default=None)

    def _of_group(self, part: int, group: Span) -> str:
        active = [
            span
            for span in self._actors.group_waits.get(group.group_id, ())
            if span.start <= self._t < span.end
        ]
        on = max(active, key=lambda span: span.end).on if active else None
        if on == REWARDS:
            domain = (
                self._actors.domains.get(group.group_id) if group.group_id is not None else None
            )
            return f"{REWARD} ({domain})" if domain else REWARD
        if on == OTHER_GROUPS:
            return self._of_other_group()
        if on not in (ENGINE, None):
            return on or NODES
        engine = self._engine_does(part)
        loop = self._actors.loops[part].at(self._t)
        # the thread makes rows for others first
        if not engine and loop is not None and loop.span.on == DATA:
            return LOADER
        if on is None and engine != GENERATE:
            return NODES
        step = self._actors.step_of.get(group.group_id) if group.group_id is not None else None
        return (
            TAIL if step is not None and self._actors.of_step[step].is_tail(self._t) else GENERATE
        )

    def _of_other_group(self) -> str:
        """A group that asks in rounds waits for the one that asks last."""
        late = [
            (part, group)
            for part, group in self._actors.groups.running(self._t)
            if not any(
                s.on == OTHER_GROUPS and s.start <= self._t < s.end
                for s in self._actors.group_waits.get(group.group_id, ())
            )
        ]
        last = max(late, key=lambda each: each[1].end, default=None)
        return self._of_group(*last) if last else GENERATE


def _decoding(engine: Iterable[Span], waits: Iterable[Span]) -> Iterator[Span]:
    """When an engine draws tokens or loads weights; when it has requests, if it has no log."""
    engine = [*engine]
    yield from (span for span in engine if span.kind == "decode" or span.what.startswith(_SWAPS))
    if not any(span.kind == "decode" for span in engine):
        yield from (span for span in waits if span.on == ENGINE)


class _Stretch(NamedTuple):
    start: float
    end: float
    kind: str
    cause: str


def charges(journal: Journal) -> list[Charge]:
    """Where all seconds went: for each device they add up to the time from the first window to the
    last."""
    actors = _Actors(journal)
    found = defaultdict[tuple[int | None, int, str, str], float](float)
    numbers = sorted(journal.ended)
    # a clock may step back
    ends = list(accumulate((journal.ended[number] for number in numbers), max))
    for device in actors.devices:
        for start, end, kind, cause in _of_device(actors, journal, device):
            start = max(start, journal.only[0])
            end = min(end, journal.only[1])
            cuts = [start, *ends[bisect_right(ends, start) : bisect_left(ends, end)], end]
            for begin, until in pairwise(cuts if end > start else ()):
                place = bisect_left(ends, until)
                step = numbers[place] if place < len(numbers) else None
                found[step, device, kind, cause] += until - begin
    return [Charge(*key, seconds) for key, seconds in found.items()]


def _of_device(actors: _Actors, journal: Journal, device: int) -> Iterator[_Stretch]:
    own = [
        s
        for name in ("training", "rollout", "engine")
        for s in actors.spans.get(name, {}).get(device, ())
    ]
    before = journal.windows[0][0] if journal.windows else 0.0
    for number, (begin, end) in enumerate(journal.windows):
        if begin > before:
            yield _Stretch(before, begin, "down", "restart")
        begin = max(begin, before)
        before = max(end, before)
        if end <= begin:  # its clock was set back
            continue
        inside = [s for s in own if s.start < end and s.end > begin]
        if not inside:
            yield _Stretch(begin, end, "down", "no worker")
            continue
        first = max(min(s.start for s in inside), begin)
        last = min(max(s.end for s in inside), end)
        yield _Stretch(begin, first, "overhead", "start")
        yield from _relabelled(
            _merged(
                _states(actors, device, max(first, journal.only[0]), min(last, journal.only[1]))
            )
        )
        is_over = journal.is_over or number + 1 < len(journal.windows)
        num_after = sum(last < t < end for t in journal.ended.values())
        lost = (
            ("down", "no worker")
            if num_after > 1
            else ("overhead", "end")
            if is_over
            else (UNKNOWN, UNKNOWN)
        )
        yield _Stretch(last, end, *lost)


def _states(actors: _Actors, device: int, first: float, last: float) -> Iterator[_Stretch]:
    if first >= last:
        return
    lines = [
        line for line in (actors.training.get(device), actors.decoding[device]) if line is not None
    ]
    cuts = sorted({first, last, *(t for line in lines for t in line.cuts() if first < t < last)})
    for begin, end in pairwise(cuts):
        kind, cause = _Walk(actors, (begin + end) / 2).device(device)
        if kind in ("busy", "overhead") and cause not in (_COMMUNICATION, *_TAKES):
            yield _Stretch(begin, end, kind, cause)
            continue
        inner = actors.cuts[bisect_right(actors.cuts, begin) : bisect_left(actors.cuts, end)]
        for start, until in pairwise([begin, *inner[:: len(inner) // _MAX_CUTS + 1], end]):
            yield _Stretch(start, until, *_Walk(actors, (start + until) / 2).device(device))


def _merged(stretches: Iterable[_Stretch]) -> Iterator[_Stretch]:
    for _, alike in groupby(stretches, key=lambda each: each[2:]):
        first, *rest = alike
        yield first._replace(end=(rest or [first])[-1].end)


def _relabelled(stretches: Iterable[_Stretch]) -> Iterator[_Stretch]:
    known = {STUCK: (_STUCK_S, _WAKES), UNKNOWN: (_GAP_S, _BETWEEN)}
    for each in stretches:
        limit, cause = known.get(each.cause, (0.0, ""))
        yield each._replace(kind="overhead", cause=cause) if each.end - each.start < limit else each


def journal_of(
    activity: RunActivity,
    timeline: Timeline,
    records: Sequence[MetricsRecord],
    events: Sequence[Event],
    step: int | None = None,
) -> Journal:
    """records, events: all of the run. step: the only one that is asked for. What came before the
    first span of a file whose start was not read is left out."""
    ended = {record.step: record.t for record in records if record.kind == "train"}
    windows = _windows(activity.spans, timeline, records, events)
    cut = [
        min(s.start for s in own) for actor, own in activity.spans.items() if actor in activity.cut
    ]
    if cut:
        begin = min((t for t in ended.values() if t >= max(cut)), default=max(cut))
        windows = [(max(start, begin), end) for start, end in windows if end > begin]
        ended = {step: t for step, t in ended.items() if t > begin}
    is_over = bool(events) and any(
        e.kind == "end" and e.restart == events[-1].restart for e in events
    )
    before = max(
        (t for other, t in ended.items() if step is not None and other < step), default=-inf
    )
    only = (-inf, inf) if step is None else (before, ended.get(step, before))
    return Journal(activity.spans, list(activity.groups.values()), ended, windows, is_over, only)


def _windows(
    spans: Mapping[str, Sequence[Span]],
    timeline: Timeline,
    records: Sequence[MetricsRecord],
    events: Sequence[Event],
) -> list[tuple[float, float]]:
    """When each restart began, and the end of what later ones kept of it."""
    ran: dict[int, list[Span]] = {}
    for span in (span for own in spans.values() for span in own):
        ran.setdefault(span.restart, []).append(span)
    found = []
    for restart, own in sorted(ran.items()):
        noted = [event for event in events if event.restart == restart]
        begin = min(
            [span.start for span in own]
            + [event.t for event in noted if event.kind == "start" and event.t]
        )
        kept = [record.t for record in records if record.restart == restart]
        is_clean = any(event.fields.get("status") in ("finished", "stopped") for event in noted)
        is_lost = any(
            span.step is not None and not timeline.survives(restart, span.step - 1) for span in own
        )
        if restart == max(ran) or (is_clean and not is_lost):
            ends = [span.end for span in own] + [event.t for event in noted]
        else:
            ends = [
                event.t for event in noted if event.kind == "checkpoint" and not event.rolled_back
            ]
        found.append((begin, max([begin, *ends, *kept])))
    return found


def price_of(config: Mapping[str, JSON]) -> float | None:
    """Of a device for an hour, by the config of a run."""
    cost = config.get("cost")
    return to_number(cost.get("gpu_hour")) if isinstance(cost, dict) else None


def shares(found: Sequence[Charge]) -> dict[str, dict[str, float]]:
    """The seconds of each kind by cause, the largest first."""
    totals = {kind: defaultdict[str, float](float) for kind in KINDS}
    for charge in found:
        totals[charge.kind][charge.cause] += charge.seconds
    return {
        kind: dict(sorted(own.items(), key=lambda each: -each[1])) for kind, own in totals.items()
    }


def invoice_json(found: Sequence[Charge], price: float | None = None) -> dict[str, JSON]:
    """For a page, and `--json`: the seconds of all devices, in total and for each step or run of
    steps. parts: indices of causes with seconds. price: of a device for an hour."""
    totals = shares(found)
    named = {
        (kind, cause): (kind, cause[:_MAX_CAUSE] if place < _MAX_CAUSES else "others")
        for kind in KINDS
        for place, cause in enumerate(totals[kind])
    }
    sums = defaultdict[tuple[str, str], float](float)
    for charge in found:
        sums[named[charge.kind, charge.cause]] += charge.seconds
    places = {cause: place for place, cause in enumerate(dict.fromkeys(named.values()))}
    numbers = sorted({charge.step for charge in found if charge.step is not None})
    every = -(-len(numbers) // _MAX_BARS) or 1
    names: dict[int | None, str] = {None: "after the last step"}
    for first in range(0, len(numbers), every):
        part = numbers[first : first + every]
        names |= dict.fromkeys(part, str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}")
    bars: dict[str, dict[int, float]] = {names[number]: defaultdict(float) for number in numbers}
    for charge in found:
        own = bars.setdefault(names[charge.step], defaultdict(float))
        own[places[named[charge.kind, charge.cause]]] += charge.seconds
    return {
        "devices": len({charge.device for charge in found}),
        "seconds": sum(charge.seconds for charge in found),
        "causes": [
            {"kind": kind, "cause": cause, "seconds": sums[kind, cause]} for kind, cause in places
        ],
        "steps": [
            {"step": name, "parts": [[i, round(s, 4)] for i, s in sorted(own.items())]}
            for name, own in bars.items()
        ],
        "gpu_hour": price,
    }


def invoice_lines(found: Sequence[Charge], price: float | None = None) -> list[str]:
    """Where the time of all devices went, in percent."""
    total, num_devices = (
        sum(charge.seconds for charge in found),
        len({charge.device for charge in found}),
    )
    if not total:
        return []
    totals = shares(found)

    def listed(kind: str) -> str:
        own = [(cause, 100 * seconds / total) for cause, seconds in totals[kind].items()]
        return ", ".join(
            f"{cause[:_MAX_CAUSE]} {share:.1f}" for cause, share in own if share >= 0.05
        )

    each = {kind: 100 * sum(causes.values()) / total for kind, causes in totals.items()}
    shown = [
        f"{kind} {each[kind]:.1f}: {listed(kind)}"
        for kind in ("busy", "overhead", "down")
        if each[kind] >= 0.05
    ]
    lines = [f"time      in % of {count_of(num_devices, 'device')} x {total / num_devices:.1f} s"]
    lines.append(f"          {' | '.join(shown)}")
    waits = f", waiting for {listed('idle')}" if listed("idle") else ""
    lines.append(f"idle      {each['idle']:.1f}{waits} | unknown {each[UNKNOWN]:.1f}")
    if price is not None:
        lost = sum(sum(totals[kind].values()) for kind in ("idle", "down", UNKNOWN))
        lines.append(
            f"costs     {total / 3600 * price:.2f}, of it {lost / 3600 * price:.2f} idle "
            f"(cost.gpu_hour={price:g})"
        )
    return lines
