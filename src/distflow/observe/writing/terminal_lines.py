"""What a run prints: a line for a step, for what happens, and for a phase that lasts."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from distflow.observe.metrics import headlines
from distflow.observe.sanitized_output import SanitizedStream, escape_control
from distflow.observe.writing.timing import duration

_STEPS_EVERY_S = 5.0
_PHASE_AFTER_S = 30.0
_PACE_STEPS = 20
_MAX_FAILURE = 100


class TerminalLines:
    """The tracker "console" (`log`, `close`), and what else a run prints.

    Steps have lines of their own: the first and the last one, those with a validation, and others
    every few seconds. After half a minute without a line, the phase that begins has one.

    file: where to write, by default standard output. generates: False for a run on given texts,
    which has neither rollouts nor scores.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        generates: bool = True,
    ):
        self._out = SanitizedStream(file or sys.stdout)
        self._total_steps = total_steps
        self._clock = clock
        self._generates = generates
        self._lock = threading.RLock()
        self._started = clock()
        self._written_at = self._started
        self._step = 0
        self._step_written_at: float | None = None
        self._step_ends: deque[float] = deque(maxlen=_PACE_STEPS)
        """Of the steps after the start; the first took the start's time too."""
        self._unwritten = ""
        """The line of the last step, if it came too soon."""
        self._failure = ""

    def phase(self, name: str, seconds: float = 0.0) -> None:
        """The run is now in this phase, and has been for so long; "" if it is unknown."""
        with self._lock:
            begins = name not in ("", "other") and not seconds
            now = self._clock()
            if begins and now - self._written_at >= _PHASE_AFTER_S:
                shown = escape_control(name, 40, one_line=True)
                self._write(
                    f"step {self._step + 1}/{self._total_steps}  {shown} begins "
                    f"{duration(now - self._started)} after the start"
                )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a finished step; several calls for one step are possible."""
        with self._lock:
            now = self._clock()
            if step > self._step:
                self._step = step
                self._step_ends.append(now)

            if not self._generates:
                values = {name: v for name, v in values.items() if name != "rollout/truncated"}
            if not headlines(values):
                return

            line = step_line(step, self._total_steps, values, self._eta_s(), self._failure)
            is_validated = any(
                name.startswith("val_correct/") or name.endswith("/val_loss") for name in values
            )
            is_due = self._step_written_at is None or now - self._step_written_at >= _STEPS_EVERY_S

            if is_validated:
                self._write(line)
            elif is_due or step >= self._total_steps:
                self._write(line)
                self._step_written_at = now
                self._unwritten = ""
            else:
                self._unwritten = line

    def reward_failed(self, reason: str) -> None:
        """Keep the text of a reward error for the line of the step."""
        with self._lock:
            self._failure = escape_control(reason, _MAX_FAILURE, one_line=True)

    def note(self, kind: str, message: str) -> None:
        """Print what happened. kind: "info", "warning", "error", "finding"."""
        text = escape_control(message)
        with self._lock:
            self._write(text if kind == "info" else f"{kind}: {text}")

    def close(self) -> None:
        """Write the line of the last step, if it has none; a second call does nothing."""
        with self._lock:
            if self._unwritten:
                self._write(self._unwritten)
                self._unwritten = ""

    def _write(self, line: str) -> None:
        self._written_at = self._clock()
        self._out.write(line + "\n")
        self._out.flush()

    def _eta_s(self) -> float | None:
        """The remaining time from the pace of the last steps; None after the last step, and before
        a second one has ended: what the first one takes says little of the others."""
        if len(self._step_ends) < 2 or self._step >= self._total_steps:
            return None
        pace = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return pace * (self._total_steps - self._step)


def step_line(
    step: int,
    total_steps: int,
    values: Mapping[str, float],
    eta_s: float | None = None,
    failure: str = "",
) -> str:
    """`step 12/60  reward  0.512  accuracy 0.870  ...    1.2 s  0:58 to go`. failure: the text of a
    reward error."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"{line.label} {line.text(value)}" for line, value in headlines(values).items()]
    if "timing_s/step" in values:
        parts.append(f"{values['timing_s/step']:5.1f} s")
    if eta_s is not None:
        parts.append(f"{duration(eta_s)} to go")

    if failed := values.get("reward/error_rate", 0.0) * values.get("reward/calls", 0.0):
        why = f" ({failure})" if failure else ""
        parts.append(f"reward errors {failed:.0f}{why}")

    return "  ".join(parts)
