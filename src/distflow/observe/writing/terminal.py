"""The live view of a run in a terminal; without a real one, plain lines.

Text of models and data goes through `escape_control` and is never read as markup.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live
from rich.panel import Panel as Frame
from rich.text import Text

from distflow.observe.metrics import headlines
from distflow.observe.sanitize import SanitizedStream, escape_control
from distflow.observe.writing.live_panel import TONES, Panel, Queue, duration

_REDRAWS_PER_S = 4
_PLAIN_EVERY_S = 5.0


class TerminalView:
    """Shows a run while it runs; also the tracker "console" (`log`, `close`).

    file: where to write, standard output unless given. live: whether to redraw in place; unless given, it is done when
    `file` is a terminal that can, and neither NO_COLOR nor TERM=dumb asks for plain text.

    What it showed last stays on the screen when it is closed, below the warnings; what is printed afterwards follows.
    Plain lines come for the first and the last step, for validations, and else once in a few seconds at most.
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
        self._out = SanitizedStream(cast(TextIO, file or sys.stdout))
        screen = self._out.below  # of which only the live view, which writes what is harmless, makes use itself
        self._title = escape_control(title, 60, one_line=True)
        self._clock = clock
        # The run's threads write while rich draws in its own; what prints under the lock may itself draw: re-entrant.
        self._lock = threading.RLock()
        self._panel = Panel(total_steps, clock())
        self._console = Console(file=screen, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._plain_at: float | None = None  # when the last plain line of a step was written
        self._unwritten = ""  # the line of the last step, where it came too soon
        if can_redraw(screen) if live is None else live:
            self._fit()
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=_REDRAWS_PER_S,
                vertical_overflow="crop",
            )
            self._live.start()
            # It has put proxies there for what others print, which would obey escapes; it takes them away again.
            sys.stdout, sys.stderr = (
                cast(TextIO, SanitizedStream(sys.stdout)),
                cast(TextIO, SanitizedStream(sys.stderr)),
            )

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the run is doing now, e.g. `phase("rollout", 12, 64)`; shown only by the live view."""
        with self._lock:
            name = escape_control(name, 40, one_line=True)
            if name != self._panel.phase:
                self._panel.phase, self._panel.phase_since = name, self._clock()
            self._panel.phase_done = "" if done is None else f"{done}/{total}" if total else str(done)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a finished step; several calls for one step are added up."""
        with self._lock:
            self._panel.take(step, values, self._clock())
            if self._live is None and headlines(values):
                self._say(step, values)

    def _say(self, step: int, values: Mapping[str, float]) -> None:
        line, now = step_line(step, self._panel.total_steps, values, self._panel.eta_s()), self._clock()
        if _is_validation(values):
            self._write(line)
        elif self._plain_at is None or now - self._plain_at >= _PLAIN_EVERY_S or step >= self._panel.total_steps:
            self._write(line)
            self._plain_at, self._unwritten = now, ""
        else:
            self._unwritten = line

    def reward_failed(self, reason: str) -> None:
        """The last reward error."""
        with self._lock:
            self._panel.failure = escape_control(reason, 300, one_line=True)

    def queue(self, running: int, complete: int, dropped: int) -> None:
        """How many prompt groups run, are complete and wait for a step, and were dropped since the start; shown only by
        the live view.

        From any thread, as often as it changes: it is drawn when the view is, and nobody waits for a view that draws.
        """
        self._panel.queue = Queue(running, complete, dropped)

    def serves(self, version: int) -> None:
        """The version that the engine serves, as `queue`."""
        self._panel.served = version

    def audited(self, step: int, num_proven: int, num_checks: int) -> None:
        """A step was audited."""
        with self._lock:
            self._panel.audit = f"audit of step {step}: {num_proven} of {num_checks} checks passed · "

    def sample(self, prompt: str, response: str, score: float | None) -> None:
        """Show one sample of the step in the live view."""
        with self._lock:
            shown = "none" if score is None else f"{score:g}"
            self._panel.sample = (
                escape_control(prompt, 200, one_line=True),
                escape_control(response, 400, one_line=True),
                shown,
            )

    def note(self, kind: str, message: str) -> None:
        """Print a line that stays (kind "info", "warning", "error", "finding"); warnings are also kept in view."""
        with self._lock:
            text = escape_control(message)
            if kind in TONES:
                self._panel.notes.append((kind, escape_control(message, 300, one_line=True)))
                self._panel.num_notes += 1
            self._write(text if kind == "info" else f"{kind}: {text}", TONES.get(kind, ""))

    def close(self, summary: Sequence[str] = ()) -> None:
        """Draw the live view for the last time, or write the line of the last step, and print the lines of `summary`; a
        second call does only the latter."""
        # Without the lock: `stop` waits for the thread that draws, which may wait for the lock.
        live, self._live = self._live, None
        if live:
            self._panel.ended = self._clock()
            live.stop()
        if self._unwritten:
            self._write(self._unwritten)
            self._unwritten = ""
        for line in summary:
            self._write(escape_control(line))

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
            shown = self._panel.render(self._clock(), columns - 4, rows - 3)
            return Frame(shown, title=Text(self._title), title_align="left", padding=(0, 1))


def can_redraw(file: TextIO) -> bool:
    """Whether `file` is a terminal that can be redrawn and whose user did not ask for plain text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    return file.isatty() and not plain


def step_line(step: int, total_steps: int, values: Mapping[str, float], eta_s: float | None = None) -> str:
    """One plain line for a step: `step 12/60  reward  0.512  accuracy 0.870  ...    1.2 s  0:58 to go`."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"{line.label} {line.text(value)}" for line, value in headlines(values).items()]
    if failed := round(values.get("reward/error_rate", 0.0) * values.get("reward/calls", 0.0)):
        parts.append(f"reward errors {failed}")
    if "timing_s/step" in values:
        parts.append(f"{values['timing_s/step']:5.1f} s")
    if eta_s is not None:
        parts.append(f"{duration(eta_s)} to go")
    return "  ".join(parts)


def _is_validation(values: Mapping[str, float]) -> bool:
    return any(name.startswith("val_correct/") or name == "sft/val_loss" for name in values)
