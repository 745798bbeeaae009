"""Rows that a module of ours makes with a package of others, in a process of its own: what is imported stays there, and
hashes of texts, on which some packages depend, do not vary."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl

from distflow.data.dataset_columns import Record
from distflow.errors import UserError
from distflow.observe.files import JSON


def made_records(module: str, arguments: Sequence[str], source: str, key: str) -> Iterator[Record]:
    """The lines that `python -m module` prints with these arguments: each a row as JSON, or `{"error": why}`.

    Raises UserError, naming the config's `key` and its `source`, for such a reason and where the process fails.
    """
    made = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        },
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if made.returncode:
        said = (made.stderr.strip() or f"its process ended with {made.returncode}").splitlines()[-1]
        raise UserError(f"{key}: '{source}' gives no rows: {said}")
    for number, line in enumerate(made.stdout.splitlines(), 1):
        found = json.loads(line)
        if "error" in found:
            raise UserError(f"{key}: '{source}': {found['error']}")
        yield Record(f"{source}, row {number}", found)


def read_settings(query: str) -> dict[str, JSON]:
    """`a=1&b=x`: values as JSON has them, else texts."""
    return {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def _value(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except ValueError:
        return text
    return value
