"""The live view of a run in a terminal, or plain lines without a real terminal.

Numbers in the live view have fixed places from the first step on: labels, values, curves and their
ranges have fixed widths. Text of models and data goes through `escape_control` and is never read as
markup.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TextIO, cast

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from distflow.observe.metrics import Headline, headlines
from distflow.observe.sanitized_output import SanitizedStream, TerminalOutput, escape_control
from distflow.observe.writing.timing import duration

WIDTH = 40
"""Most bars of a curve."""
_BARS = "▁▂▃▄▅▆▇█"


class Curve:
    """The values of a whole run, as means of equally many neighbours, so that their number is
    bounded."""

    def __init__(self) -> None:
        self.low = math.inf
        self.high = -math.inf
        self._means: list[float] = []
        self._each = 1
        self._open = list[float]()

    def append(self, value: float) -> None:
        if math.isfinite(value):
            self.low = min(self.low, value)
            self.high = max(self.high, value)
        self._open.append(value)
        if len(self._open) == self._each:
            self._means.append(_mean(self._open))
            self._open = []
        if len(self._means) == 4 * WIDTH:
            self._means = means(self._means, 2 * WIDTH)
            self._each = 2 * self._each

    @property
    def values(self) -> list[float]:
        return self._means + ([_mean(self._open)] if self._open else [])


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as at most `width` bars, scaled between minimum and maximum; a non-finite one is
    "×"."""
    shown = means(values, max(width, 0)) if len(values) > width else values
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def bar(value: float) -> str:
        height = (value - low) / (high - low) if high > low else 0.5
        return _BARS[min(int(height * len(_BARS)), len(_BARS) - 1)]

    return "".join(bar(value) if math.isfinite(value) else "×" for value in shown)


def means(values: Sequence[float], number: int) -> list[float]:
    """The means of `number` consecutive parts of the values, whose sizes differ by at most one."""
    ends = [len(values) * part // max(number, 1) for part in range(number + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(ends)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


TONES = {"warning": "yellow", "error": "red", "finding": "yellow"}
_LABEL = 10
_VALUE = 9
_RANGE = 15
_TWO_ABREAST = 96
"""Terminal columns from which numbers are shown in two columns."""
_REDRAWS_PER_S = 4
_PLAIN_EVERY_S = 5.0
_PLAIN_PHASE_AFTER_S = 30.0


class TerminalView:
    """Shows a run while it runs; also the tracker "console" (`log`, `close`).

    file: where to write, by default standard output. live: whether to redraw in place; by default
    if `file` is a terminal that supports it, and neither NO_COLOR nor TERM=dumb asks for plain
    text.

    The last view stays on the screen when it is closed, below the warnings; later output follows
    it. Plain lines are written for the first and the last step, for validations, and otherwise at
    most every few seconds; after half a minute without one, also for the phase that begins.

    generates: False for a run on given texts, which has neither rollouts nor scores.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        file: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        generates: bool = True,
    ):
        self._out = SanitizedStream(file or sys.stdout)
        self._title = escape_control(title, 60, one_line=True)
        self._clock = clock
        self._lock = threading.Lock()  # the run's threads write while rich draws in its own
        self._panel = Panel(total_steps, clock(), generates)
        # not sanitized: the live view moves the cursor
        screen = cast(TextIO, TerminalOutput(self._out.below))
        self._console = Console(
            file=screen, force_terminal=True, highlight=False, markup=False, emoji=False
        )
        self._live: Live | None = None
        self._height = 0  # of the last view that was drawn, in lines
        self._plain_at: float | None = None  # when the last plain line of a step was written
        self._written_at = clock()
        self._unwritten = ""  # the line of the last step, if it came too soon
        if can_redraw(self._out.below) if live is None else live:
            self._fit()
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=_REDRAWS_PER_S,
                vertical_overflow="crop",
            )
            self._live.start()
            # rich put proxies there for other output, which would interpret escapes; it removes
            # them later.
            sys.stdout = SanitizedStream(sys.stdout)
            sys.stderr = SanitizedStream(sys.stderr)

    def phase(self, name: str, seconds: float = 0.0) -> None:
        """Show the current phase of the run, and how long it has lasted; "" if it is unknown."""
        with self._lock:
            panel = self._panel
            now = self._clock()
            panel.phase = escape_control(name, 40, one_line=True)
            panel.phase_since = now - seconds
            begins = name not in ("", "other") and not seconds
            if self._live is None and begins and now - self._written_at >= _PLAIN_PHASE_AFTER_S:
                so_far = duration(now - panel.started)
                self._write(
                    f"step {panel.step + 1}/{panel.total_steps}  {panel.phase} begins {so_far} "
                    "after the start"
                )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a finished step; several calls for one step are merged."""
        with self._lock:
            if not self._panel.generates:
                values = {
                    name: value for name, value in values.items() if name != "rollout/truncated"
                }
            self._panel.take(step, values, self._clock())
            if self._live is not None or not headlines(values):
                return
            line = step_line(step, self._panel.total_steps, values, self._panel.eta_s())
            now = self._clock()
            if any(
                name.startswith("val_correct/") or name.endswith("/val_loss") for name in values
            ):
                self._write(line)
            elif (
                self._plain_at is None
                or now - self._plain_at >= _PLAIN_EVERY_S
                or step >= self._panel.total_steps
            ):
                self._write(line)
                self._plain_at = now
                self._unwritten = ""
            else:
                self._unwritten = line

    def reward_failed(self, reason: str) -> None:
        with self._lock:
            self._panel.failure = escape_control(reason, 300, one_line=True)

    def queue(self, unfinished: int, complete: int, dropped: int) -> None:
        """Show how many prompt groups are generating or scoring (or wait to generate again), are
        queued for a step, and were dropped since the start; only in the live view.

        Callable from any thread, at every change: it is drawn with the view, and nobody waits for
        drawing.
        """
        self._panel.queue = (unfinished, complete, dropped)

    def weight_version(self, version: int) -> None:
        """Show the version of the engine's weights, as `queue` does."""
        self._panel.weight_version = version

    def audited(self, step: int, num_proven: int, num_checks: int) -> None:
        with self._lock:
            self._panel.audit = (
                f"audit of step {step}: {num_proven} of {num_checks} checks passed · "
            )

    def sample(self, prompt: str, response: str, score: float | None) -> None:
        with self._lock:
            shown = (
                escape_control(prompt, 200, one_line=True),
                escape_control(response, 400, one_line=True),
            )
            self._panel.sample = (*shown, "none" if score is None else f"{score:g}")

    def note(self, kind: str, message: str) -> None:
        """Print a permanent line (kind "info", "warning", "error", "finding"); warnings also stay
        in view."""
        text = escape_control(message)
        if kind in TONES:
            with self._lock:
                self._panel.notes.append((kind, escape_control(message, 300, one_line=True)))
                self._panel.num_notes += 1
        # Without our lock: the thread that draws waits for it while it holds the lock of rich that
        # this needs.
        self._write(text if kind == "info" else f"{kind}: {text}", TONES.get(kind, ""))

    def close(self) -> None:
        """Draw the live view for the last time, or write the line of the last step; a second call
        does nothing."""
        # Without the lock: `stop` waits for the drawing thread, which may wait for the lock.
        live = self._live
        self._live = None
        if live:
            self._panel.ended = self._clock()
            live.stop()
        if self._unwritten:
            self._write(self._unwritten)
            self._unwritten = ""

    def _write(self, line: str, style: str = "") -> None:
        self._written_at = self._clock()
        if self._live:
            self._console.print(Text(line, style=style), soft_wrap=True)
        else:
            self._out.write(line + "\n")
            self._out.flush()

    def _fit(self) -> None:
        """Follow the size of our terminal, which may change; rich would use that of the standard
        streams.

        A terminal without a known size reports 0, where rich would search for room forever, as in a
        very narrow one. A terminal that has become narrower wraps the lines of the last view: rich
        erases as many as it wrote, and we the rest.
        """
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self._out.fileno())
            size = ConsoleDimensions(max(columns or 80, 20), max(rows or 24, 6))
            wrapped = self._height * (-(-self._console.size.width // size.width) - 1)
            self._console.file.write("\r\x1b[2K" + "\x1b[A\x1b[2K" * wrapped if wrapped > 0 else "")
            self._console.size = size

    def _render(self) -> RenderableType:
        with self._lock:
            self._fit()
            columns, rows = self._console.size
            shown = self._panel.render(self._clock(), columns - 4, rows - 3)
            self._height = len(shown.renderables) + 2
            return Frame(shown, title=Text(self._title), title_align="left", padding=(0, 1))


def can_redraw(file: TextIO) -> bool:
    """Whether `file` is a terminal that can be redrawn and whose user did not ask for plain
    text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    return file.isatty() and not plain


def step_line(
    step: int, total_steps: int, values: Mapping[str, float], eta_s: float | None = None
) -> str:
    """One plain line for a step:
    `step 12/60  reward  0.512  accuracy 0.870  ...    1.2 s  0:58 to go`."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"{line.label} {line.text(value)}" for line, value in headlines(values).items()]
    if failed := values.get("reward/error_rate", 0.0) * values.get("reward/calls", 0.0):
        parts.append(f"reward errors {failed:.0f}")
    if "timing_s/step" in values:
        parts.append(f"{values['timing_s/step']:5.1f} s")
    if eta_s is not None:
        parts.append(f"{duration(eta_s)} to go")
    return "  ".join(parts)


class Panel:
    """The displayed state of a run. now: the time in seconds, of any one clock."""

    def __init__(self, total_steps: int, now: float, generates: bool = True):
        self.total_steps = total_steps
        self.generates = generates
        self.step = 0
        self.started = now
        self.ended: float | None = None
        self.step_ends: deque[float] = deque(maxlen=20)
        """Of the steps after the start; the first took the start's time too."""
        self.values: dict[str, float] = {}
        self.history: dict[Headline, Curve] = {}
        self.phase = "starting"
        self.phase_since = now
        self.notes: deque[tuple[str, str]] = deque(maxlen=3)
        self.num_notes = 0
        self.audit = ""
        # numbers of unfinished, complete and dropped groups
        self.queue: tuple[int, int, int] | None = None
        self.weight_version: int | None = None
        self.failure = ""
        self.sample: tuple[str, str, str] | None = None

    def take(self, step: int, values: Mapping[str, float], now: float) -> None:
        """Take the metrics of a finished step, or some of them."""
        if step > self.step:
            self.step_ends.append(now)
        self.step = max(self.step, step)
        # an earlier step's time for a validation is not a share of this one
        if "timing_s/step" in values:
            self.values = {
                name: value
                for name, value in self.values.items()
                if not name.startswith("timing_s/")
            }
        self.values.update(values)
        for line, value in headlines(values).items():
            self.history.setdefault(line, Curve()).append(value)

    def eta_s(self) -> float | None:
        """The remaining time from the pace of the last steps; None after the last step, and before
        a second one has ended: what the first one takes says little of the others."""
        if len(self.step_ends) < 2 or self.step >= self.total_steps:
            return None
        pace = (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)
        return pace * (self.total_steps - self.step)

    def render(self, now: float, columns: int, rows: int) -> Group:
        """The view in at most `rows` lines, omitting the least important."""
        top = self._progress(now)
        urgent = self._reward_errors()
        numbers = self._numbers(columns)[: max(rows - len(top) - len(urgent), 0)]
        below = [*self._queue(), *self._checks(), *self._times(), *self._speeds()]
        below += [_row(kind, message, style=TONES[kind]) for kind, message in self.notes]
        if self.num_notes > len(self.notes):
            below.append(
                _row(
                    "",
                    f"and {self.num_notes - len(self.notes)} earlier ones, in events.jsonl",
                    style="dim",
                )
            )
        if self.sample:
            prompt, response, score = self.sample
            below.append(_row("prompt", prompt))
            below.append(
                _row("response", response, f"  score {score}")
                if self.generates
                else _row("target", response)
            )
        lines = [*top, *numbers, *urgent, *below]
        return Group(*lines[: max(rows, 1)])

    def _progress(self, now: float) -> list[RenderableType]:
        table = Table.grid(
            Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 2), expand=True
        )
        eta = self.eta_s()
        times = f"{duration(now - self.started)} so far" + (
            f", {duration(eta)} to go" if eta is not None else ""
        )
        if self.ended is not None:
            times = f"ended after {duration(self.ended - self.started)}"
        step = f"step {self.step:>{len(str(self.total_steps))}}/{self.total_steps}"
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.step)
        table.add_row(Text(step, style="bold"), bar, Text(times))
        if self.ended is not None or not self.phase:
            return [table]
        return [table, _row("now", f"{self.phase} {duration(now - self.phase_since)}")]

    def _numbers(self, columns: int) -> list[RenderableType]:
        abreast = 2 if columns >= _TWO_ABREAST else 1
        width = (columns - 3 * (abreast - 1)) // abreast
        shown = headlines(self.values)
        # as they came: none ever moves
        cells = [self._number(line, shown[line], width) for line in self.history]
        rows = [cells[first : first + abreast] for first in range(0, len(cells), abreast)]
        return [Text("   ", no_wrap=True, overflow="crop").join(row) for row in rows]

    def _number(self, line: Headline, value: float, width: int) -> Text:
        """Label, value, curve of the run, and its range, as far as there is room."""
        room = width - _LABEL - _VALUE - 2
        span = _RANGE if room >= _RANGE + 8 else 0
        curve = min(room - span - bool(span), WIDTH)
        history = self.history[line]
        cell = Text(no_wrap=True, overflow="crop").append(f"{line.label:<{_LABEL}}", "dim")
        cell.append(f"{line.text(value):>{_VALUE}}  ", "bold")
        cell.append(f"{sparkline(history.values, curve):<{max(curve, 0)}}", "cyan")
        if span and history.low <= history.high:
            cell.append(
                f" {f'{line.text(history.low).strip()}…{line.text(history.high).strip()}':<{span}}",
                "dim",
            )
        return cell

    def _reward_errors(self) -> list[RenderableType]:
        """The number of reward errors in the last step, and the text of the last one."""
        if "reward/calls" not in self.values:
            return []
        calls = self.values["reward/calls"]
        rate = self.values.get("reward/error_rate", 0.0)
        if not rate:
            return [_row("errors", f"0 of {calls:,.0f} reward calls")]
        return [
            _row(
                "errors",
                f"{rate * calls:,.0f} of {calls:,.0f} reward calls: {self.failure}",
                style="red",
            )
        ]

    def _queue(self) -> list[RenderableType]:
        """The content of the sample queue, the engine's weight version, and the staleness of the
        last step."""
        rows = []
        if self.queue is not None and self.generates:
            unfinished, complete, dropped = self.queue
            rows.append(
                _row(
                    "rollouts",
                    (
                        f"{unfinished:>4,} generating or scoring, {complete:>5,} queued, "
                        f"{dropped:>5,} dropped"
                    ),
                )
            )
        if self.weight_version is not None and self.generates:
            stale = ""
            if mean := self.values.get("async/version_diff/mean", 0.0):
                most = self.values.get("async/version_diff/max", mean)
                stale = f"; trained on {mean:.1f} steps stale, {most:.0f} at most"
            rows.append(_row("engine", f"serves version {self.weight_version:,}{stale}"))
        return rows

    def _checks(self) -> list[RenderableType]:
        if not self.step:
            return []
        warnings = f"{self.num_notes or 'no'} warning{'s' if self.num_notes != 1 else ''}"
        return [_row("checks", f"{self.audit}{warnings}", style="yellow" if self.num_notes else "")]

    def _times(self) -> list[RenderableType]:
        step_s = self.values.get("timing_s/step", 0.0)
        phases = {
            name.removeprefix("timing_s/"): seconds
            for name, seconds in self.values.items()
            if name.startswith("timing_s/") and name != "timing_s/step"
        }
        longest = sorted(phases.items(), key=lambda item: -item[1])[:4]
        shares = [
            f"{name} {seconds / step_s:.0%}" for name, seconds in longest if step_s and seconds
        ]
        return [_row("time", f"{step_s:.1f} s a step: {' · '.join(shares)}")] if shares else []

    def _speeds(self) -> list[RenderableType]:
        rates = [
            (name.removeprefix("throughput/"), n)
            for name, n in self.values.items()
            if "throughput/" in name
        ]
        speeds = [f"{name} {speed:,.0f}" for name, speed in rates if name != "tokens_per_s"]
        return [_row("tokens/s", " · ".join(speeds))] if speeds else []


def _row(label: str, text: str, tail: str = "", style: str = "") -> RenderableType:
    columns = (
        Column(width=_LABEL - 1, no_wrap=True),
        Column(ratio=1, no_wrap=True, overflow="ellipsis"),
    )
    table = Table.grid(*columns, Column(no_wrap=True), padding=(0, 0, 0, 1), expand=True)
    shown = Text(
        escape_control(text, one_line=True), style=style, no_wrap=True, overflow="ellipsis"
    )
    table.add_row(Text(escape_control(label), style="dim"), shown, Text(tail))
    return table
