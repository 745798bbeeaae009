"""What somebody hostile puts in the place of a file of a run's, a checkpoint's or a model's
folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from distflow.observe.sample_files import write_sample_file

Spoil = Callable[[Path], None]
"""Puts something else in a file's place."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HUGE = 10**4000


def doubling(first: str, line: str) -> str:
    """Each line repeats the one before: 26 of them stand for 2^25 of the first, or more."""
    return first + "".join(line.format(this=LETTERS[i], last=LETTERS[i - 1]) for i in range(1, 26))


YAML = {
    "aliases": doubling("a: &a [x, x]\n", "{this}: &{this} [*{last}, *{last}]\n"),
    "references": doubling(
        "a: xxxxxxxxxxxxxxxx\n", "{this}: '${{{last}}}${{{last}}}${{{last}}}'\n"
    ),
    "deep": "{a: " * 50_000,
    "NUL": "trainer: {seed: 1}\n\0\n",
    "escapes": 'trainer: {experiment_name: "\\e[2J\\u202e"}\n"\\e]0;x": 3\n',
}


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def sparse(path: Path) -> None:
    """20 GB, of which the disk holds nothing."""
    with path.open("r+b") as file:
        file.truncate(20 * 2**30)


def link_out(path: Path) -> None:
    """To a file that is as sound, but not in the folder that was handed over."""
    outside = path.parents[2] / f"outside-{path.parent.name}-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


KINDS: dict[str, Spoil] = {
    "FIFO": fifo,
    "device": device,
    "folder": folder,
    "sparse": sparse,
    "link out": link_out,
}


def after(content: bytes) -> Spoil:
    """Appends."""

    def write(path: Path) -> None:
        with path.open("ab") as file:
            file.write(content)

    return write


def line(**record: object) -> bytes:
    return json.dumps({"t": 1.0, "restart": 0, **record}).encode() + b"\n"


def measured(step: object, values: object, **record: object) -> bytes:
    return line(kind="train", step=step, m=values, **record)


_EXTREME = {
    **{f"reward/{name}": 1e308 for name in ("mean_score", "max", "min", "calls", "errors")},
    "reward/frac_reward_zero_std": "NaN",
    "timing_s/step": 1e308,
    "timing_s/a": 1e308,
    "actor/skipped": 1e308,
    "actor/x": HUGE,
    "domains/a/groups": 1e308,
    "domains/a/errors": 1e308,
    "domains/b/groups": HUGE,
    "domains/b/errors": "Infinity",
}
_EXTREMES = (
    measured(1, _EXTREME)
    + measured(2, _EXTREME, t=1e300)
    + measured(HUGE, _EXTREME)
    + measured(3, _EXTREME)
)

JOURNALS: dict[str, tuple[str, bytes]] = {
    "100,000 names": ("metrics.jsonl", measured(1, {f"timing_s/{i}": 1.5 for i in range(100_000)})),
    "extreme numbers": ("metrics.jsonl", _EXTREMES),
    "deep": ("metrics.jsonl", b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"),
    "a long line": ("metrics.jsonl", b'{"step": 1, "m": "' + b"y" * 20_000_000 + b'"}\n'),
    "millions of lines": ("metrics.jsonl", b"{}\n" * 1_000_000),
    "a long failure": (
        "events.jsonl",
        line(
            kind="error", message="\x1b[2J\u202e" * 100_000, traceback="\x1b<" * 500_000, raised="x"
        )
        + line(kind="end", message="\x1b]0;x\x07", status="failed"),
    ),
    "responses": (
        "samples/000001.parquet",
        b"".join(line(uid=f"1-{i}", prompt="<", response="<") for i in range(10_000)),
    ),
}
"""By name: which file of a run's folder, and what is appended to it (a .json file is written
anew)."""


def spoil_journal(run: Path, name: str) -> None:
    file, content = JOURNALS[name]
    if file.endswith(".parquet"):
        write_sample_file(
            run / file, [json.loads(line) for line in content.splitlines()], 1, "train"
        )
    elif file.endswith(".json"):
        (run / file).write_bytes(content)
    else:
        after(content)(run / file)
