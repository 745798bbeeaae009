"""What a run prints."""

import io
import re

from distflow.observe.sanitized_output import escape_control
from distflow.observe.writing.terminal_lines import TerminalLines, step_line
from distflow.observe.writing.timing import PhaseTimer, duration

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


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    now = [0.0]
    view = TerminalLines(4, file=out, clock=lambda: now[0])
    view.phase("rollout")
    now[0] = 2.0
    view.log(1, VALUES)
    view.log(1, {"memory/cpu": 1.0})
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


def test_the_first_step_predicts_nothing():
    """It has the start's time and the kernels' warm-up in it, and step 0 is a validation alone."""
    out = io.StringIO()
    now = [0.0]
    view = TerminalLines(4, file=out, clock=lambda: now[0])

    for step, ended in ((0, 20.0), (1, 30.0), (2, 35.0)):
        now[0] = ended
        view.log(step, {"val_correct/all/mean": 0.5})

    view.close()
    validated, first, second = out.getvalue().splitlines()
    assert "to go" not in validated + first
    assert second.endswith("0:10 to go")


def test_plain_lines_are_few_and_stand_under_one_another():
    out = io.StringIO()
    now = [0.0]
    view = TerminalLines(200, file=out, clock=lambda: now[0])

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


def test_the_last_step_has_a_line_however_the_run_ends():
    out = io.StringIO()
    view = TerminalLines(9, file=out, clock=lambda: 0.0)
    for step in (1, 2, 3):
        view.log(step, {"reward/mean_score": 0.5, "reward/calls": 8.0, "reward/error_rate": 0.25})
    view.close()
    view.close()
    assert [line[:8] for line in out.getvalue().splitlines()] == ["step 1/9", "step 3/9"]
    assert "reward errors 2" in out.getvalue()


def test_the_line_of_a_step_has_the_text_of_a_reward_error():
    out = io.StringIO()
    view = TerminalLines(1, file=out)
    view.reward_failed(f"ValueError: {EVIL}")
    view.log(1, {"reward/mean_score": 0.5, "reward/calls": 8.0, "reward/error_rate": 0.25})
    view.close()
    assert "reward errors 2 (ValueError: \\x1b[2J" in out.getvalue()
    assert out.getvalue().count("\n") == 1


def test_supervised_training_has_no_truncated_responses():
    out = io.StringIO()
    view = TerminalLines(1, file=out, generates=False)
    view.log(1, {"sft/loss": 2.5, "rollout/truncated": 0.0})
    assert "loss  2.5000" in out.getvalue()
    assert "truncated" not in out.getvalue()


def test_output_that_cannot_hold_the_text_is_escaped_not_raised():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    view = TerminalLines(1, file=out)
    view.note("warning", "grün \ud800")
    assert raw.getvalue() == b"warning: gr\\xfcn \\ud800\n"


def test_a_step_that_lasts_is_seen_in_plain_lines_too():
    out = io.StringIO()
    now = [0.0]
    view = TerminalLines(9, file=out, clock=lambda: now[0])
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


def test_small_helpers():
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
