"""Which model it is, for a run's folder: a path alone does not say so, for what lies there may change."""

import hashlib
from pathlib import Path

from transformers.utils import cached_file

from distflow.config.errors import UserError
from distflow.models.paths import is_local, resolve_path, why_not_loaded

_PIECES, _PIECE_BYTES = 64, 2**16


def identity(path: str, revision: str | None = None) -> dict[str, str]:
    """`path`, `revision` and `fingerprint`: of a hub id its commit; of a folder a hash of its files' names and sizes,
    of all that small ones hold and of pieces from all over the weights, which training changes everywhere.

    Raises UserError for a folder that there is not, and where the hub does not have the model.
    """
    source = resolve_path(path)
    if is_local(source):
        return {"path": source, "revision": "", "fingerprint": _of_folder(Path(source))}
    try:
        config = cached_file(source, "config.json", revision=revision)
    except OSError as error:
        raise UserError(f"model '{source}' cannot be loaded: {why_not_loaded(source, str(error))}") from error
    assert config is not None, "it raises where there is none"
    return {"path": source, "revision": revision or "", "fingerprint": Path(config).parent.name}


def _of_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            step = max(size // _PIECES, _PIECE_BYTES)
            for start in (*range(0, size, step), max(size - _PIECE_BYTES, 0)):
                opened.seek(start)
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()[:12]
