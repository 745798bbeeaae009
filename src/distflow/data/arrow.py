"""Arrow files in a run's folder: written whole or not at all, for their owner alone."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

CHUNK_ROWS = 1000
"""Rows of a record batch: few enough to be read for one of them."""


def write_arrow(file: Path, schema: "pyarrow.Schema", batches: "Iterable[pyarrow.RecordBatch]") -> None:
    """Beside its place, synced, then renamed. Raises OSError."""
    import pyarrow

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as sink:
            with pyarrow.ipc.new_file(sink, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(aside, file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def metadata_of(file: Path) -> Mapping[bytes, bytes]:
    """What the file's schema says of it; nothing where the file is missing, torn or no Arrow file."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as memory:
            return pyarrow.ipc.open_file(memory).schema.metadata or {}
    except (pyarrow.ArrowException, OSError):
        return {}
