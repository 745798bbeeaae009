"""Sanitizes text of models, data, files and users before it is printed or written, so that it
cannot move the cursor, hide lines or reverse them.

`escape_control` is for lines that people read, `SanitizedStream` for whole streams (standard output
and error), `escaped_json` for JSON in files and pages. `TerminalOutput` outlives its terminal.
`quiet_libraries` hides library messages that a user cannot act on; errors and warnings of the
user's code are shown.
"""

import errno
import io
import json
import logging
import os
import re
import stat
import sys
import time
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_BAR_EVERY_S = 10.0
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
# Characters that JSON allows but terminals or editors interpret: DEL and C1, soft hyphen, direction
# marks, joiners, separators, interlinear marks, tags.
_OBEYED = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def escape_control(text: str, limit: int | None = None, one_line: bool = False) -> str:
    """The text with control, format and unpaired characters written as escapes (`\\x1b`,
    `\\u202e`).

    one_line: line ends are shown as ⏎. limit: longer text is cut before anything else, and ends in
    "…".
    """
    cut = limit is not None and len(text) > limit
    shown = "".join(_escape_character(character, one_line) for character in text[:limit])
    return shown + "…" if cut else shown


def escaped_json(text: str) -> str:
    """JSON text whose invisible characters are JSON escapes: it is read back unchanged, and
    harmless to display."""
    if text.isascii() and "\x7f" not in text:
        return text
    return _OBEYED.sub(lambda found: json.dumps(found[0])[1:-1], text)


def valid_utf8(value: object) -> Any:
    """A text with unpaired surrogates as escapes, which UTF-8 can hold; anything else unchanged."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value


class TerminalOutput(io.TextIOBase):
    """Writes to the stream `below`, and outlives its terminal: output to a closed terminal is
    discarded.

    Writes to a closed terminal fail before SIGHUP arrives, but only the handler of SIGHUP stops the
    run cleanly.
    """

    def __init__(self, below: TextIO) -> None:
        self.below: TextIO = below.below if isinstance(below, TerminalOutput) else below

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        return getattr(self.below, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        try:
            self.below.write(text)
        except OSError as error:
            self._leave_dead_terminal(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.below.flush()
        except OSError as error:
            self._leave_dead_terminal(error)

    def fileno(self) -> int:
        return self.below.fileno()

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        # attributes that only some streams have, such as `reconfigure`
        return getattr(self.below, name)

    def _leave_dead_terminal(self, error: OSError) -> None:
        """Send all further and buffered output to /dev/null. Raises any other error."""
        if error.errno != errno.EIO or not stat.S_ISCHR(os.fstat(self.fileno()).st_mode):
            raise error
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.fileno())


class SanitizedStream(TerminalOutput):
    """A stream that applies `escape_control` and writes to the one below, in its encoding.

    It does not report to be a terminal, so that libraries omit colours and redrawing, even if
    `below` is one. Lines rewritten with carriage returns, like progress bars, become a line every
    ten seconds and one at the end.
    """

    # text last written with a carriage return, and when such a line was shown or began
    _bar = ""
    _bar_at = 0.0

    def write(self, text: str) -> int:
        if not text:  # progress bars test in this way whether the stream is open
            return 0

        shown = text.lstrip("\r")
        if shown != text and "\n" not in text:
            now = time.monotonic()
            self._bar_at = self._bar_at or now
            self._bar = shown.rstrip()
            if not self._bar or now - self._bar_at < _BAR_EVERY_S:
                return len(text)
            self._bar_at = now
            shown = ""
        elif self._bar_at:
            self._bar_at = 0.0
            shown = "" if shown == "\n" else shown

        if self._bar:
            self._bar, shown = "", f"{self._bar}\n{shown}"
        super().write(
            escape_control(shown).encode(self.encoding, "backslashreplace").decode(self.encoding)
        )

        return len(text)


@contextmanager
def sanitized_output() -> Iterator[None]:
    """Inside, standard output and error are `SanitizedStream`s."""
    out = sys.stdout
    err = sys.stderr
    sys.stdout = SanitizedStream(out)
    sys.stderr = SanitizedStream(err)

    try:
        yield
    finally:
        sys.stdout = out
        sys.stderr = err


def _escape_character(character: str, one_line: bool) -> str:
    if character == "\n":
        return "⏎" if one_line else character
    if character == "\t":
        return " "
    if (
        character.isascii()
        and character.isprintable()
        or unicodedata.category(character) not in _HIDDEN
    ):
        return character
    if character.isascii():
        return f"\\x{ord(character):02x}"

    return character.encode("ascii", "backslashreplace").decode()


# Which of their functions a library calls next year does not concern our users.
_LIBRARIES = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "huggingface_hub",
    "peft",
    "torch",
    "transformers",
)
_OUTDATED = (DeprecationWarning, FutureWarning)

_LOGGER = "bitsandbytes.backends.cpu.ops"
# an alternative that our runs do not use
_LOGGED = "Failed to load CPU gemm_4bit_forward from kernels-community"


def quiet_libraries() -> None:
    """Omit those lines from now on. `-W`, PYTHONWARNINGS and user code take precedence."""
    for category in _OUTDATED:
        warnings.filterwarnings(
            "ignore", category=category, module=rf"({'|'.join(_LIBRARIES)})(\.|$)", append=True
        )

    logging.getLogger(_LOGGER).addFilter(
        lambda r: r.levelno >= logging.ERROR or not str(r.msg).startswith(_LOGGED)
    )
