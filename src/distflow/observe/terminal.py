"""The live view of a run in a terminal; without a real one, a plain line a step.

Text of models and data goes through `visible` and is never read as markup.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distflow.observe.metrics import headlines
from distflow.observe.text import Harmless, visible

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 200
_REDRAWS_PER_S = 4
_TONES = {"warning": "yellow", "error": "red", "finding": "yellow"}


class TerminalView:
    """Shows a run while it runs; also the tracker "console" (`log`, `close`).

    file: where to write, standard output unless given. live: whether to redraw in place; unless given, it is done when
    `file` is a terminal that can, and neither NO_COLOR nor TERM=dumb asks for plain text.

    When it is closed the live view is gone from the screen; warnings and what is printed afterwards stay.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        file: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._out = Harmless(cast(TextIO, file or sys.stdout))
        screen = self._out.below  # of which only the live view, which writes what is harmless, makes use itself
        self._title = visible(title, 60, one_line=True)
        self._clock = clock
        # The run's threads write while rich draws in its own; what prints under the lock may itself draw: re-entrant.
        self._lock = threading.RLock()
        self._state = _State(total_steps, clock())
        self._console = Console(file=screen, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        if can_redraw(screen) if live is None else live:
            self._fit()
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=_REDRAWS_PER_S,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()
            # It has put proxies there for what others print, which would obey escapes; it takes them away again.
            sys.stdout, sys.stderr = cast(TextIO, Harmless(sys.stdout)), cast(TextIO, Harmless(sys.stderr))

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the run is doing now, e.g. `phase("rollout", 12, 64)`; shown only by the live view."""
        with self._lock:
            name = visible(name, 40, one_line=True)
            if name != self._state.phase:
                self._state.phase, self._state.phase_since = name, self._clock()
            self._state.phase_done = "" if done is None else f"{done}/{total}" if total else str(done)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a finished step; several calls for one step are added up."""
        with self._lock:
            self._state.take(step, values, self._clock())
            if self._live is None and headlines(values):
                self._write(step_line(step, self._state.total_steps, values, self._state.eta_s()))

    def sample(self, prompt: str, response: str, score: float | None) -> None:
        """Show one sample of the step in the live view."""
        with self._lock:
            shown = "no verdict" if score is None else f"{score:g}"
            self._state.sample = (visible(prompt, 200, one_line=True), visible(response, 400, one_line=True), shown)

    def note(self, kind: str, message: str) -> None:
        """Print a line that stays (kind "info", "warning", "error", "finding"); warnings are also kept in view."""
        with self._lock:
            text = visible(message)
            if kind in _TONES:
                self._state.notes.append((kind, visible(message, 300, one_line=True)))
                self._state.num_notes += 1
            self._write(text if kind == "info" else f"{kind}: {text}", _TONES.get(kind, ""))

    def close(self, summary: Sequence[str] = ()) -> None:
        """Take the live view off the screen, leave a line of the last step, and print the lines of `summary`; a second
        call does only the latter."""
        # Without the lock: `stop` waits for the thread that draws, which may wait for the lock.
        live, self._live = self._live, None
        if live:
            live.stop()
            if self._state.step:
                self._write(step_line(self._state.step, self._state.total_steps, self._state.values))
        for line in summary:
            self._write(visible(line))

    def _write(self, line: str, style: str = "") -> None:
        if self._live:
            self._console.print(Text(line, style=style), soft_wrap=True)
        else:
            self._out.write(line + "\n")
            self._out.flush()

    def _fit(self) -> None:
        """Follow the size of our own terminal, which may change; left alone, rich asks that of the standard streams.

        A terminal that nobody told its size says 0; rich would look for room there for ever, as in a very narrow one.
        """
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self._out.fileno())
            self._console.size = ConsoleDimensions(max(columns or 80, 20), max(rows or 24, 6))

    def _render(self) -> RenderableType:
        with self._lock:
            self._fit()
            columns, rows = self._console.size
            shown = self._state.render(self._clock(), columns - 4, rows - 3)
            return Panel(shown, title=Text(self._title), title_align="left", padding=(0, 1))


class _State:
    """What the view shows."""

    def __init__(self, total_steps: int, now: float):
        self.total_steps = total_steps
        self.step = 0
        self.started = now
        self.step_ends: deque[float] = deque([now], maxlen=20)
        self.values: dict[str, float] = {}
        self.history: dict[str, deque[float]] = {}
        self.phase, self.phase_since, self.phase_done = "starting", now, ""
        self.notes: deque[tuple[str, str]] = deque(maxlen=3)
        self.num_notes = 0
        self.sample: tuple[str, str, str] | None = None
        self.first_accuracy: float | None = None

    def take(self, step: int, values: Mapping[str, float], now: float) -> None:
        if step > self.step or len(self.step_ends) == 1:
            self.step_ends.append(now)
        self.step = max(self.step, step)
        if "timing_s/step" in values:  # what an earlier step spent on a validation is no share of this one
            self.values = {name: value for name, value in self.values.items() if not name.startswith("timing_s/")}
        self.values.update(values)
        if self.first_accuracy is None:
            self.first_accuracy = values.get("val_correct/all/mean")
        for label, shown in headlines(values).items():
            self.history.setdefault(label, deque(maxlen=_HISTORY)).append(float(shown.replace(",", "")))

    def eta_s(self) -> float | None:
        """From the pace of the last steps; None before there is one, and after the last step."""
        if len(self.step_ends) < 2 or self.step >= self.total_steps:
            return None
        pace = (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)
        return pace * (self.total_steps - self.step)

    def render(self, now: float, columns: int, rows: int) -> RenderableType:
        """At most `rows` lines, the least important left out."""
        lines: list[RenderableType] = []
        times = _phase_shares(self.values)
        if times:
            lines.append(_row("time", times))
        lines += [_row(kind, message, style=_TONES[kind]) for kind, message in self.notes]
        if self.sample:
            prompt, response, score = self.sample
            lines += [_row("prompt", prompt), _row("answer", response, f"  score {score}")]
        if self.num_notes > len(self.notes):
            lines.append(_row("", f"and {self.num_notes - len(self.notes)} earlier ones, in events.jsonl", style="dim"))
        numbers = self._numbers(per_row=2 if columns >= 76 else 1, rows=max(rows - 2, 0))
        return Group(self._progress(now), numbers, *lines[: max(rows - 2 - numbers.row_count, 0)])

    def _progress(self, now: float) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True)
        eta = self.eta_s()
        doing = f"{self.phase} {duration(now - self.phase_since)} {self.phase_done}".strip()
        table.add_row(
            Text(f"step {self.step}/{self.total_steps}", style="bold"),
            ProgressBar(total=max(self.total_steps, 1), completed=self.step),
            Text(f"{duration(now - self.started)} so far" + (f", {duration(eta)} to go" if eta is not None else "")),
        )
        table.add_row(Text("now", style="dim"), Text(doing, no_wrap=True, overflow="ellipsis"), Text(""))
        return table

    def _numbers(self, per_row: int, rows: int) -> Table:
        table = Table.grid(padding=(0, 2))
        for _ in range(3 * per_row):
            table.add_column(no_wrap=True)
        shown = list(headlines(self.values).items())[: per_row * rows]
        for first in range(0, len(shown), per_row):
            cells: list[RenderableType] = []
            for label, value in shown[first : first + per_row]:
                if label == "accuracy" and self.first_accuracy is not None and len(self.history[label]) > 1:
                    value = f"{value} (was {self.first_accuracy:.3f})"
                cells += [
                    Text(label, style="dim"),
                    Text(value, style="bold"),
                    Text(sparkline(self.history[label], 14), style="cyan"),
                ]
            table.add_row(*cells)
        return table


def can_redraw(file: TextIO) -> bool:
    """Whether `file` is a terminal that can be redrawn and whose user did not ask for plain text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    return file.isatty() and not plain


def step_line(step: int, total_steps: int, values: Mapping[str, float], eta_s: float | None = None) -> str:
    """One plain line for a step: `step 12/60  reward 0.512  accuracy 0.870  ...  1.2 s  0:58 to go`."""
    parts = [f"step {step}/{total_steps}", *(f"{label} {value}" for label, value in headlines(values).items())]
    if "timing_s/step" in values:
        parts.append(f"{values['timing_s/step']:.1f} s")
    if eta_s is not None:
        parts.append(f"{duration(eta_s)} to go")
    return "  ".join(parts)


def sparkline(values: Sequence[float] | deque[float], width: int) -> str:
    """The last `width` values as bars between their least and greatest; a value that is not finite is "×"."""
    last = list(values)[-width:]
    finite = [value for value in last if abs(value) < float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    bars = []
    for value in last:
        if not abs(value) < float("inf"):
            bars.append("×")
        else:
            height = (value - low) / (high - low) if high > low else 0.5
            bars.append(_BARS[min(int(height * len(_BARS)), len(_BARS) - 1)])
    return "".join(bars)


def duration(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    whole = max(int(seconds), 0)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _phase_shares(values: Mapping[str, float]) -> str:
    step_s = values.get("timing_s/step", 0.0)
    phases = {
        name.removeprefix("timing_s/"): seconds
        for name, seconds in values.items()
        if name.startswith("timing_s/") and name != "timing_s/step"
    }
    longest = sorted(phases.items(), key=lambda item: -item[1])[:4]
    return " · ".join(f"{name} {seconds / step_s:.0%}" for name, seconds in longest if step_s and seconds)


def _row(label: str, text: str, tail: str = "", style: str = "") -> RenderableType:
    table = Table.grid(padding=(0, 0, 0, 1), expand=True)
    table.add_column(width=8, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True)
    shown = Text(visible(text, one_line=True), style=style, no_wrap=True, overflow="ellipsis")
    table.add_row(Text(visible(label), style="dim"), shown, Text(tail))
    return table
