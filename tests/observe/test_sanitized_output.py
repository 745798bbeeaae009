"""Which lines of libraries are left out, and that no other is; output to a terminal that is
gone."""

import errno
import io
import logging
import os
import re
import subprocess
import sys

import pytest

from distflow.observe.sanitized_output import _LOGGED, _LOGGER, SanitizedStream, TerminalOutput

PROBE = """
import logging, sys, types, warnings
from distflow.observe.sanitized_output import quiet_libraries
quiet_libraries()
def warn(module, category, text):
    exec(f"import warnings; warnings.warn({text!r}, {category})", {"__name__": module, "__file__": f"{module}.py"})
warn("transformers.modeling_utils", "FutureWarning", "theirs 1")
warn("torch.optim", "DeprecationWarning", "theirs 2")
warn("transformers.modeling_utils", "UserWarning", "shown 1")
warn("torch_of_mine", "FutureWarning", "shown 2")
warn("reward", "FutureWarning", "shown 3")
warn("reward", "UserWarning", "shown 4")
bnb = logging.getLogger("bitsandbytes.backends.cpu.ops")
bnb.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "theirs 3")
bnb.error("Failed to load CPU gemm_4bit_forward from kernels-community: shown 5")
bnb.warning("shown 6")
"""  # noqa: E501


def said(*options: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", PROBE], capture_output=True, text=True, check=True
    )
    return [
        word for line in done.stderr.splitlines() for word in ("theirs", "shown") if word in line
    ]


def test_what_nobody_can_act_on_is_left_out_and_nothing_else():
    assert said() == ["shown"] * 6


def test_who_asks_for_warnings_gets_them():
    assert said("-W", "always").count("theirs") == 2


@pytest.mark.slow
def test_the_lines_are_still_theirs():
    """One that they have changed would be shown again."""
    module = pytest.importorskip(_LOGGER)
    source = module.__loader__.get_source(_LOGGER)
    assert isinstance(module.logger, logging.Logger) and _LOGGED in source


@pytest.mark.parametrize("kind", [TerminalOutput, SanitizedStream])
def test_output_to_a_terminal_that_is_gone_is_discarded(kind):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", buffering=1) as terminal:
        os.close(ours)
        with pytest.raises(OSError) as raised:
            os.write(theirs, b"x")
        assert raised.value.errno == errno.EIO

        stream = kind(terminal)
        for text in ("no line end", "a line\n", "another\n"):
            assert stream.write(text) == len(text)
            stream.flush()

        assert os.fstat(theirs).st_rdev == os.stat(os.devnull).st_rdev


def test_other_errors_of_output_are_raised():
    with open("/dev/full", "w") as full, pytest.raises(OSError) as raised:  # noqa: PTH123
        TerminalOutput(full).write("x" * 100_000)
    assert raised.value.errno == errno.ENOSPC


def test_a_progress_bar_is_a_line_at_its_end_and_one_every_ten_seconds(monkeypatch):
    now, below = [5.0], io.StringIO()
    monkeypatch.setattr("distflow.observe.sanitized_output.time.monotonic", lambda: now[0])

    stream = SanitizedStream(below)
    for number in range(35):
        stream.write(f"\r{number}/35\x1b[A")
        stream.flush()
        now[0] += 1.0

    stream.write("\n")
    print("next", file=stream)
    assert (
        below.getvalue()
        == "".join(f"{number}/35\\x1b[A\n" for number in (10, 20, 30, 34)) + "next\n"
    )


@pytest.mark.parametrize(
    ("writes", "shown"),
    [
        (("\rhalf", "an error\n"), "half\nan error\n"),
        (("\r50%", "\r   ", "done\n"), "done\n"),
        (("\rwhole\n", "\n"), "whole\n\n"),
        (("a\n", "\n", "b"), "a\n\nb"),
    ],
)
def test_no_text_of_a_carriage_return_is_lost(writes, shown):
    below = io.StringIO()
    stream = SanitizedStream(below)
    for text in writes:
        stream.write(text)
    assert below.getvalue() == shown


def test_the_bars_of_a_library_are_one_line_each():
    tqdm = pytest.importorskip("tqdm").tqdm
    below = io.StringIO()
    for _ in tqdm(
        range(500), desc="tensors", mininterval=0.0, miniters=1, file=SanitizedStream(below)
    ):
        pass

    assert re.fullmatch(r"tensors: 100%.* 500/500 .*\n", below.getvalue())
