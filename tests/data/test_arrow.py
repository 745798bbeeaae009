"""Arrow files: whole or not there, and what their schema says."""

import pyarrow
import pytest

from distflow.data.encoded_rows_file import metadata_of, write_arrow

TABLE = pyarrow.table({"row": ["a", "b"]}).replace_schema_metadata({"source": "me"})


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    def batches():
        yield from TABLE.to_batches()
        raise OSError(28, "No space left on device")

    file = tmp_path / "data" / "a.arrow"
    write_arrow(file, TABLE.schema, TABLE.to_batches())
    before = file.read_bytes()
    with pytest.raises(OSError, match="No space"):
        write_arrow(file, TABLE.schema, batches())
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_metadata(tmp_path):
    file = tmp_path / "a.arrow"
    assert metadata_of(file) == {}
    write_arrow(file, TABLE.schema, TABLE.to_batches())
    assert metadata_of(file) == {b"source": b"me"}
    file.write_bytes(file.read_bytes()[:-1])
    assert metadata_of(file) == {}
