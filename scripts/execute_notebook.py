"""Executes examples/notebook.ipynb and writes it with its outputs, without the folder's path in
them.

.venv/bin/python scripts/execute_notebook.py
"""

import tempfile
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
LIMIT_S = 240


def executed(folder: Path) -> nbformat.NotebookNode:
    """The notebook after a run in a folder. Raises what a cell raises."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        resources=resources,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()

    return nbformat.reads(nbformat.writes(notebook).replace(f"{folder}/", ""), as_version=4)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = executed(Path(name).resolve())
    found.metadata.pop("language_info", None)
    NOTEBOOK.write_text(nbformat.writes(found) + "\n")
    print(NOTEBOOK)
