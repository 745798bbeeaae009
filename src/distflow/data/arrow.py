"""Arrow files in a run's folder: written whole or not at all, for their owner alone."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.observe.files import replacing

if TYPE_CHECKING:
    import pyarrow

CHUNK_ROWS = 1000
"""Rows of a record batch: few enough to be read for one of them."""


def write_arrow(file: Path, schema: "pyarrow.Schema", batches: "Iterable[pyarrow.RecordBatch]") -> None:
    """Whole or not at all. Raises OSError."""
    import pyarrow

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(file) as aside, aside.open("wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def metadata_of(file: Path) -> Mapping[bytes, bytes]:
    """What the file's schema says of it; nothing where the file is missing, torn or no Arrow file."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as memory:
            return pyarrow.ipc.open_file(memory).schema.metadata or {}
    except (pyarrow.ArrowException, OSError):
        return {}
