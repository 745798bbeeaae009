"""What `distflow selftest` prints, in lines that can be shown as soon as they are known."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

from distflow.selftest.pairs import Row

_LINE = "{:<7}{:<45}{:>5}{:>9}{:>11}{:>10}{:>9}{:>8}  {}"


def head() -> str:
    return _LINE.format(
        "", "largest differences", "steps", "loss", "grad norm", "log-prob", "weight", "limit", ""
    ).rstrip()


def line(row: Row) -> str:
    found = map(_short, astuple(row.found)) if row.found else ("-",) * 4
    verdict = "left out" if row.left_out else "ok" if row.ok else "FAILED"
    return _LINE.format(row.program, row.pair, row.num_steps, *found, _short(row.limit), verdict)


def left_out(rows: Sequence[Row]) -> Iterator[str]:
    """What was not tried, and why."""
    for why in dict.fromkeys(row.left_out for row in rows if row.left_out):
        count = sum(row.left_out == why for row in rows)
        yield f"{count} of {len(rows)} pairs are left out, and not proven here. {why}"


def advice(failed: Sequence[Row], folder: Path) -> Iterator[str]:
    """What failed, and what can be done about it."""
    for row in failed:
        yield f"FAILED: {row.program}, {row.pair}: {row.fault or 'they differ by more than the limit'}"
    yield f"the runs are kept: {folder}/PROGRAM/RUN, with report.html in each, and PROGRAM/killed.log"
    yield (
        "Trust no result of this machine before this is explained: see what `distflow doctor` finds wrong, install "
        "distflow and the torch that it asks for afresh, and if it stays, report it with this table and that folder"
    )


def _short(number: float) -> str:
    return f"{number:.0e}" if number else "0"
