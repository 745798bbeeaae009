"""The view of a run: live in a terminal (a real pseudo-terminal, read back), plain lines
elsewhere."""

import fcntl
import io
import math
import os
import pty
import re
import struct
import termios
import threading
import time

import pytest
from rich.console import RenderableType

from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.terminal_view import TerminalView, can_redraw, duration, step_line
from distflow.observe.writing.timing import PhaseTimer

VALUES = {
    "reward/mean_score": 0.5124,
    "val_correct/all/mean": 0.75,
    "actor/kl_loss": 0.0012,
    "actor/entropy": 1.25,
    "rollout/avg_response_length": 23.14,
    "throughput/tokens_per_s": 12345.6,
    "timing_s/step": 2.0,
    "timing_s/rollout": 1.5,
    "timing_s/other": 0.5,
}
EVIL = "\x1b[2J\x1b]0;owned\x07[bold red]markup[/] \u202egnp.exe\r\n\x9b31m"


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    now = [0.0]
    view = TerminalView("run", 4, file=out, clock=lambda: now[0])
    view.phase("rollout")
    now[0] = 2.0
    view.log(1, VALUES)
    view.log(1, {"memory/cpu": 1.0})
    view.sample("p", EVIL, 1.0)
    view.note("warning", f"tracker {EVIL}")
    view.note("info", "a checkpoint")
    view.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == (
        "step 1/4  reward  0.512  accuracy 0.750  kl  0.0012  entropy  1.250  length   23.1  "
        "tokens/s  12,346    2.0 s"
    )
    assert lines[1].startswith("warning: tracker \\x1b[2J") and "[bold red]markup[/]" in lines[1]
    assert lines[-1] == "a checkpoint"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out.getvalue())


def test_the_first_step_predicts_nothing() -> None:
    """It has the start's time and the kernels' warm-up in it, and step 0 is a validation alone."""
    out = io.StringIO()
    now = [0.0]
    view = TerminalView("run", 4, file=out, clock=lambda: now[0])
    for step, ended in ((0, 20.0), (1, 30.0), (2, 35.0)):
        now[0] = ended
        view.log(step, {"val_correct/all/mean": 0.5})
    view.close()
    validated, first, second = out.getvalue().splitlines()
    assert "to go" not in validated + first
    assert second.endswith("0:10 to go")


def test_plain_lines_are_few_and_stand_under_one_another() -> None:
    out = io.StringIO()
    now = [0.0]
    view = TerminalView("run", 200, file=out, clock=lambda: now[0])
    for step in range(1, 201):
        now[0] += 1.0
        if step == 50:
            view.log(step, {"val_correct/all/mean": 0.5})
        view.log(
            step,
            {
                "reward/mean_score": step / 100 - 1,
                "rollout/truncated": step / 200,
                "timing_s/step": 1.0,
            },
        )
    view.close()
    lines = out.getvalue().splitlines()
    steps = [int(line[5:8]) for line in lines]
    assert steps == [1, 6, 11, 16, 21, 26, 31, 36, 41, 46, 50, *range(51, 200, 5), 200]
    rest = [line for line in lines if "accuracy" not in line]
    assert len(rest) == len(lines) - 1
    assert (
        len({(line.index("reward"), line.index("truncated"), line.index(" s")) for line in rest})
        == 1
    )


def test_the_last_step_has_a_line_however_the_run_ends() -> None:
    out = io.StringIO()
    view = TerminalView("run", 9, file=out, clock=lambda: 0.0)
    for step in (1, 2, 3):
        view.log(step, {"reward/mean_score": 0.5, "reward/calls": 8.0, "reward/error_rate": 0.25})
    view.close()
    view.close()
    assert [line[:8] for line in out.getvalue().splitlines()] == ["step 1/9", "step 3/9"]
    assert "reward errors 2" in out.getvalue()


def test_output_that_cannot_hold_the_text_is_escaped_not_raised() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    view = TerminalView("run", 1, file=out)
    view.note("warning", "grün \ud800")
    assert raw.getvalue() == b"warning: gr\\xfcn \\ud800\n"


class Terminal:
    """A pseudo-terminal of a given size, and what was written to it."""

    def __init__(self, columns: int = 80, rows: int = 24):
        self._read_end, write_end = pty.openpty()
        fcntl.ioctl(write_end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.file = os.fdopen(write_end, "w", encoding="utf-8")
        self._seen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._read_end, 65536)
            except OSError:
                return
            self._seen += data

    def seen(self) -> str:
        self.file.close()
        self._reader.join(5)
        os.close(self._read_end)
        return self._seen.decode()


def screen(output: str) -> list[str]:
    """What stays on the screen: plays back line ends, "erase line", "cursor up" and carriage
    returns."""
    lines = [""]
    row = 0
    column = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row -= int(token[2:-1] or 1)
            elif token == "\x1b[2K":
                lines[row] = ""
        else:
            lines[row] = (
                lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            )
            column += len(token)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 10)])
def test_live_view_fits_escapes_and_stays_as_it_was_last(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal(*size)
    view = TerminalView("quick[red]start" + EVIL, 60, file=terminal.file)
    for step in range(1, 13):
        view.phase("rollout" + EVIL)
        view.log(step, {**VALUES, "reward/mean_score": float("nan") if step == 3 else step / 60})
        view.sample(EVIL, EVIL * 100, None)
    for i in range(5):
        view.note("warning", f"number {i} {EVIL}")
    view.close()
    output = terminal.seen()
    assert "step 12/60" in output and "quick[red]start" in output
    assert "\u202e" not in output and "\x9b" not in output and "\x07" not in output
    assert "\x1b[2J" not in output and "owned\x07" not in output
    left = [line for line in screen(output) if line]
    text = "".join(left)
    assert text.count("╭") == text.count("╰") == 1, left
    assert left[-1].startswith("╰")
    assert "step 12/60" in text and "ended after" in text and " now " not in text
    above = "".join(left[: next(i for i, line in enumerate(left) if line.startswith("╭"))])
    assert above.count("warning: number") == 5 and above.count("[bold red]markup[/]") == 5
    frames = re.findall(r"╭[^╰]*╰[^╯]*╯", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output))
    assert len(frames) > 5 and frames[-1].count("╭") == 1
    for frame in frames:
        rows = frame.split("\n")
        assert len(rows) < size[1], (
            "a frame as high as the terminal scrolls, and leaves its top behind"
        )
        assert all(len(row.rstrip("\r")) <= size[0] for row in rows)


def test_the_time_shown_is_that_of_the_last_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    view = TerminalView("run", 3, file=terminal.file)
    view.log(
        1,
        {
            "timing_s/eval": 3.0,
            "timing_s/rollout": 1.0,
            "timing_s/step": 4.0,
            "val_correct/all/mean": 0.5,
        },
    )
    view.log(2, {"timing_s/rollout": 1.0, "timing_s/step": 2.0})
    view.close()
    last = re.findall(r"╭[^╰]*╰", terminal.seen())[-1]
    assert "rollout 50%" in last and "eval" not in last and "0.500" in last


def frames_of(output: str) -> list[list[str]]:
    """The inner lines of each frame that was drawn."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    return [
        [line.strip() for line in frame.split("\n")[1:-1]]
        for frame in re.findall(r"╭[^╰]*╰", plain)
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_number_stays_at_its_place(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size, and whatever is measured later for the first time."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(columns, 40)
    view = TerminalView("run", 9, file=terminal.file)
    for step, value in enumerate((0.5, -1234.5, float("nan"), 1e12, 3e-9), 1):
        view.log(
            step,
            {"reward/mean_score": value, "actor/grad_norm": abs(value), "rollout/truncated": 0.25},
        )
        if step == 3:
            view.log(step, {"val_correct/all/mean": 0.5})
    view.close()
    places = {
        (label, number, line.index(label))
        for frame in frames_of(terminal.seen())
        for number, line in enumerate(frame[2:] if "now" in frame[1] else frame[1:])
        for label in ("reward", "grad norm", "truncated", "accuracy")
        if label in line
    }
    assert {label for label, *_ in places} == {"reward", "grad norm", "truncated", "accuracy"}
    assert len(places) == 4, places


def test_a_curve_stands_beside_its_range_and_reward_errors_beside_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(100, 40)
    view = TerminalView("run", 9, file=terminal.file)
    for step, reward in enumerate((0.25, 0.75, 0.5), 1):
        view.log(
            step, {"reward/mean_score": reward, "reward/calls": 64.0, "reward/error_rate": 3 / 64}
        )
    view.reward_failed(f"ValueError: {EVIL} (at reward.py:3)")
    view.audited(3, 15, 17)
    view.note("warning", "look here")
    view.close()
    last = "\n".join(frames_of(terminal.seen())[-1])
    assert re.search(r"reward +0\.500 +▁█▅ +0\.250…0\.750", last)
    assert "3 of 64 reward calls: ValueError: \\x1b[2J" in last
    assert "audit of step 3: 15 of 17 checks passed · 1 warning" in last


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_shown(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    names = (
        "reward/calls",
        "reward/error_rate",
        "reward/mean_score",
        "timing_s/step",
        "timing_s/rollout",
    )
    values = dict.fromkeys((*names, "async/version_diff/mean", "throughput/rollout"), value)
    terminal = Terminal(100, 40)
    view = TerminalView("run", 9, file=terminal.file)
    view.weight_version(1)
    view.log(1, values)
    view.close()
    assert "reward calls" in "\n".join(frames_of(terminal.seen())[-1])
    assert str(value) in step_line(1, 9, values)


def test_the_queue_is_shown_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called by several threads at once, as often as groups end."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(80, 24)
    view = TerminalView("run", 9, file=terminal.file)
    threads = [
        threading.Thread(target=lambda: [view.queue(i, 2 * i, 0) for i in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    view.queue(1234, 16, 3)
    view.weight_version(12)
    view.log(1, {"async/version_diff/mean": 1.25, "async/version_diff/max": 3.0})
    view.close()
    last = frames_of(terminal.seen())[-1]
    assert any(
        re.search(r"rollouts +1,234 generating or scoring, +16 queued, +3 dropped", line)
        for line in last
    ), last
    assert any(
        "engine    serves version 12; trained on 1.2 steps stale, 3 at most" in line
        for line in last
    ), last


def test_the_phase_shown_is_the_one_that_runs_with_its_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an inner phase the outer one continues."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    now = [0.0]
    view = TerminalView("run", 9, file=terminal.file, clock=lambda: now[0])
    phases = PhaseTimer(on_change=view.phase, clock=lambda: now[0])
    with phases("train_step"):
        now[0] = 7.0
        with phases("audit"):
            now[0] = 9.0
        now[0] = 16.0
        drawn = view._panel.render(now[0], 76, 20)
    view._console.print(drawn)
    view.close()
    assert "now       train_step 0:16" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.seen())


def test_supervised_training_has_no_words_of_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    values = {
        "sft/loss": 2.5,
        "rollout/truncated": 0.0,
        "rollout/avg_response_length": 9.0,
        "throughput/train_step": 810.4,
    }
    values |= {"timing_s/data": 0.5, "timing_s/train_step": 1.5, "timing_s/step": 2.0}
    terminal = Terminal(80, 24)
    view = TerminalView("run", 9, file=terminal.file, generates=False)
    lines = io.StringIO()
    plain = TerminalView("run", 9, file=lines, generates=False)
    for each in (view, plain):
        each.phase("data")
        each.queue(0, 64, 0)
        each.weight_version(1)
        each.log(1, values)
        each.sample("2+2=", "4", None)
        each.close()
    last = "\n".join(frames_of(terminal.seen())[-1])
    assert not re.search(
        "rollout|response|truncated|generating|engine|score|reward", last + lines.getvalue()
    ), last
    assert "time      2.0 s a step: train_step 75% · data 25%" in last and re.search(
        "target +4", last
    )
    assert "tokens/s  train_step 810" in last and "loss  2.5000" in lines.getvalue()


def test_a_step_that_lasts_is_seen_in_plain_lines_too() -> None:
    out = io.StringIO()
    now = [0.0]
    view = TerminalView("run", 9, file=out, clock=lambda: now[0])
    phases = PhaseTimer(on_change=view.phase, clock=lambda: now[0])
    for name in ("start", "rollout", "train_step"):
        with phases(name):
            now[0] += 20.0
    now[0] += 70
    view.note("info", "saved")
    with phases("save"), phases("audit"):
        now[0] += 70
    assert out.getvalue().splitlines() == [
        "step 1/9  train_step begins 0:40 after the start",
        "saved",
    ]


def test_a_view_that_draws_keeps_nobody_who_tells_of_the_queue() -> None:
    view = TerminalView("run", 9, file=io.StringIO())
    with view._lock:
        teller = threading.Thread(
            target=lambda: (view.queue(1, 2, 3), view.weight_version(4)), daemon=True
        )
        teller.start()
        teller.join(5)
        assert not teller.is_alive()


def test_a_note_and_a_view_that_draws_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drawing thread has rich's lock and asks for the panel; a note asks for rich's lock at
    that moment."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, draws, noted = Terminal(), threading.Event(), threading.Event()
    view = TerminalView("run", 9, file=terminal.file)
    assert view._live is not None

    def render() -> RenderableType:
        draws.set()
        time.sleep(0.05)
        return view._render()

    monkeypatch.setattr(view._live, "_get_renderable", render)

    def note() -> None:
        for i in range(5):
            draws.clear()
            draws.wait(5)
            view.note("warning", f"number {i}")
        noted.set()

    threading.Thread(target=note, daemon=True).start()
    assert noted.wait(30)
    view.close()
    assert "warning: number 4" in terminal.seen()


def test_a_narrower_terminal_keeps_no_part_of_an_earlier_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wraps the lines that are there, so that a view of n lines takes 2 n."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(100, 60)
    view = TerminalView("run", 9, file=terminal.file)
    view.log(1, {**VALUES})
    view.close()
    before = view._height
    fcntl.ioctl(terminal.file, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 60, 0, 0))
    view._fit()
    view._fit()
    view._console.file.flush()
    assert terminal.seen().count("\x1b[A") == before > 5


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "")])
def test_a_terminal_that_asks_for_plain_text_gets_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    assert can_redraw(terminal.file)
    monkeypatch.setenv(name, value)
    assert not can_redraw(terminal.file)
    view = TerminalView("run", 3, file=terminal.file)
    view.log(1, VALUES)
    view.close()
    assert "\x1b" not in terminal.seen()


def test_small_helpers() -> None:
    assert [duration(seconds) for seconds in (0, 67.9, 3661, -5)] == [
        "0:00",
        "1:07",
        "1:01:01",
        "0:00",
    ]
    assert step_line(3, 9, {}) == "step 3/9"
    assert (
        escape_control("a\tb\nc", one_line=True) == "a b⏎c"
        and escape_control("abcdef", 3) == "abc…"
    )
    assert escape_control("é 日本 \u200b\x7f\U000e0041") == "é 日本 \\u200b\\x7f\\U000e0041"
