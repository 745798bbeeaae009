"""Results that write themselves down: a dated section of RESULTS.md, newest first, with the machine
and the commit.

    python benchmarks/record.py [FILE]

runs the tests for a GPU (`make test-gpu`), and notes how many passed, and which failed.
"""

import contextlib
import datetime
import io
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import torch

from distflow.commands.selftest.device import find_device

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/RESULTS.md"
_SHOWN = 10


class _Both(io.StringIO):
    """Keeps what is printed, and shows it."""

    def __init__(self, shown: io.TextIOBase) -> None:
        super().__init__()
        self._shown = shown

    def write(self, text: str) -> int:
        self._shown.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._shown.flush()


@contextlib.contextmanager
def recorded(path: Path, command: str) -> Iterator[None]:
    """What is printed within becomes a section of the file; also where it ends early, which the
    section then says."""
    ended = ""
    with contextlib.redirect_stdout(_Both(sys.stdout)) as printed:  # type: ignore[type-var]
        try:
            yield
        except BaseException as error:  # whatever ends it; it is raised again
            ended = (
                f"\nIt ended early: {type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
            )
            raise
        finally:
            write_section(path, f"`{command}`:\n\n{printed.getvalue().strip()}\n{ended}")


def write_section(path: Path, text: str) -> None:
    """Before the other sections."""
    head, separator, rest = path.read_text("utf-8").partition("\n## ")
    section = f"\n## {datetime.date.today().isoformat()}, {machine()}\n\n{text.strip()}\n"
    path.write_text(f"{head}{section}{separator}{rest}", "utf-8")
    print(f"written to {path}")


def machine() -> str:
    """Device, driver, torch and commit."""
    return f"{find_device('auto').text}, torch {torch.__version__}, commit {_commit()}"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        " with changes"
        if git("status", "--porcelain", "--", ".", ":!benchmarks/RESULTS.md")
        else ""
    )


def run_tests(path: Path, *arguments: str) -> int:
    """pytest's status. The section says what passed, failed and was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.call(
            [sys.executable, "-m", "pytest", *arguments, "-rs", f"--junitxml={report}"], cwd=ROOT
        )
        if not report.is_file():
            print("pytest left no report, so nothing is recorded")
            return status

        text = summary(ElementTree.parse(report).getroot())

    write_section(path, f"`pytest {' '.join(arguments)}`: {text}")
    return status


def summary(report: ElementTree.Element) -> str:
    """Of a report in JUnit's format. A test that ran several times counts once, as it went the last
    time."""
    cases = list(
        {
            (case.get("classname"), case.get("name")): case for case in report.iter("testcase")
        }.values()
    )
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    text = (
        f"{len(cases) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped, "
        f"{seconds:.0f} s."
    )
    if not failed:
        return text

    names = "".join(f"\n- {case.get('classname')}.{case.get('name')}" for case in failed[:_SHOWN])
    more = f"\n- and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return f"{text} Failed:\n{names}{more}"


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("make test-gpu: torch finds no CUDA device here, so nothing was tested")
    raise SystemExit(run_tests(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS, "-m", "gpu"))


if __name__ == "__main__":
    main()
