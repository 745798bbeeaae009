"""Errors for users: a user's mistake (exit status 2; the message says what, where and what to do)
and a failed check of the run; helpers for their messages."""

import functools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import distflow

_LEAST_SIMILARITY = 0.6  # of `difflib`: below it a guess is noise
_MAX_LISTED = 12
_MOST_OF_FAULT = 1000
_from_python: ContextVar[bool] = ContextVar("from_python", default=False)


class RayNotStarted(RuntimeError):
    """Ray could not be started on this machine."""


class UserError(ValueError):
    """A mistake in the user's input (config, data, model folder, reward); never a fault of ours."""

    def _render_traceback_(self) -> list[str]:
        """For IPython: the message without our traceback."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Problem:
    """One mistake in a config.

    places: what is involved, each as (what it is, where it was written), e.g. ("trainer.seed",
    "run.yaml:7").
    """

    places: tuple[tuple[str, str], ...]
    what: str
    advice: str = ""

    def __str__(self) -> str:
        lines = [f"  {subject} ({where})" for subject, where in self.places]
        lines += [f"      {line}" for line in self.what.splitlines()]
        if self.advice:
            lines.append(f"      → {self.advice}")
        return "\n".join(lines)


class ConfigError(UserError):
    """All mistakes in a config at once. `problems` holds the parts of the message."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        count = count_of(len(self.problems), "problem")
        super().__init__(
            f"{count} in the config\n" + "\n".join(str(problem) for problem in self.problems)
        )


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """Begins a user's errors inside with a name: that of a key, a file or a run."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


@contextmanager
def called_from_python() -> Iterator[None]:
    """Inside, advice names arguments of a Python call, not options of the command."""
    token = _from_python.set(True)
    try:
        yield
    finally:
        _from_python.reset(token)


def resume_advice(mode: str) -> str:
    """`--resume never`, or `resume="never"` in a call from Python. mode: "never", a path or a
    placeholder."""
    if _from_python.get():
        return f'resume="{mode}"'
    return f"--resume {mode}"


def allow_change_advice(keys: Sequence[str]) -> str:
    """`--allow-change KEY` for each key, or the argument of a call from Python."""
    if _from_python.get():
        return f"allow_change={[*keys]}"
    return " ".join(f"--allow-change {key}" for key in keys)


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def count_of(number: int, noun: str) -> str:
    """ "1 step", "2 steps", "3 processes"."""
    if number == 1:
        ending = ""
    elif noun.endswith("s"):
        ending = "es"
    else:
        ending = "s"

    return f"{number} {noun}{ending}"


def duration_text(seconds: float) -> str:
    """`48 s`, `3.8 minutes`."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.2g} s"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, ignoring case; empty if none is similar enough."""
    by_lower = {other.lower(): other for other in known}
    close = get_close_matches(name.lower(), by_lower, cutoff=_LEAST_SIMILARITY)
    close.sort(key=lambda other: sorted(other) != sorted(name.lower()))  # exchanged letters first
    return by_lower[close[0]] if close else ""


def joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def missing_path(path: Path) -> tuple[str, str]:
    """The message that a path does not exist, and advice: the nearest name beside it, or the first
    missing folder."""
    if "$" in str(path):
        return (
            "a file does not expand variables of the shell",
            "write the path, or ${oc.env:NAME}/... in its place",
        )
    if re.match(r"\w+:/", str(path)):
        return (
            "is an address, from which nothing is downloaded",
            "download the file, and write its path",
        )

    if not os.path.isdir(path.parent):
        absent = next(folder for folder in reversed(path.parents) if not os.path.isdir(folder))
        looked = "" if path.is_absolute() else f" in {Path.cwd()}"
        return (
            f"there is no folder '{absent}'{looked}",
            "check the path, or start the command in its folder",
        )

    entries = sorted(path.parent.iterdir())
    stems = {entry.stem: entry.name for entry in entries if entry.suffix == path.suffix}

    near = stems.get(nearest(path.stem, stems)) or next(
        (each.name for each in entries if each.stem == path.stem), ""
    )
    if near:
        meant = f"did you mean '{path.with_name(near)}'?"
    else:
        meant = f"see the content of '{path.parent.resolve()}'"

    return "there is no such file or folder", meant


def hint(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest of the known names, else "; known: a, b, ..."; empty
    if none is known."""
    names = sorted(set(known))
    if guess := nearest(name, names):
        return f"; did you mean '{guess}'?"

    more = ", ..." if len(names) > _MAX_LISTED else ""
    if names:
        return f"; known: {', '.join(names[:_MAX_LISTED])}{more}"
    return ""


def users_place(error: BaseException) -> str | None:
    """File (or function) and line of the innermost frame that is neither ours nor a library's, or
    None."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def describe_fault(error: BaseException) -> str:
    """An error of the user's code in words: its type, its text, and the place in that code."""
    said = f"{type(error).__name__}: {error}"[:_MOST_OF_FAULT]
    if "coroutine" in str(error):
        said += ": is `await` missing?"
    place = users_place(error)
    return f"{said} (at {place})" if place else said


def users_place_of(thread_id: int) -> str | None:
    """The same for the line that a thread is running."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return None
    return _innermost(traceback.extract_stack(frame))


def _innermost(frames: traceback.StackSummary) -> str | None:
    for frame in reversed(frames):
        if frame.filename == "<dynamic-code>":  # of a pickled function, which has lost its file
            return f"{frame.name}, line {frame.lineno}"

        # a script's may be relative
        file = "" if frame.filename.startswith("<") else os.path.abspath(frame.filename)

        if file and not file.startswith(_library_folders()):
            return f"{Path(frame.filename).name}:{frame.lineno}"

    return None


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {
        str(Path(distflow.__file__).parent),
        sys.prefix,
        *(paths[kind] for kind in ("stdlib", "purelib", "platlib")),
    }
    return tuple(f"{folder}/" for folder in found)


class TrustError(RuntimeError):
    """A check of the run failed, so its results would be worthless. The message has measurement and
    likely causes."""


class PipelineError(UserError):
    """An invalid pipeline. The message names the node, the field or option, and the nearest
    existing name."""


class MissingColumn(PipelineError):
    """A node reads a column that no earlier node writes."""

    def __init__(self, message: str, column: str):
        super().__init__(message)
        self.column = column
