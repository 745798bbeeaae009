"""Checkpoints: complete or absent. After a kill at any point, a full disk or a flipped bit one is left that loads.

FOLDER/step-000012/   one file a part, or one for each rank that has shards of it, and manifest.json with their sizes
                      and checksums
FOLDER/latest         the name of the newest, moved last
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from distflow.errors import UserError
from distflow.runtime.checkpoint.files import MANIFEST, DamagedError, part_of, read_manifest, read_part, verify
from distflow.runtime.checkpoint.folder import (
    LATEST,
    CheckpointError,
    by_age,
    checkpoints_in,
    make_partial,
    partial_of,
    remove_leftovers,
    serial_of,
)
from distflow.runtime.checkpoint.shards import Layout
from distflow.runtime.checkpoint.writing import Retention, Writing, or_give_up

_MAX_NAME = 256


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified.

    files: by part. message: what to tell the user if it is not the requested one.
    """

    step: int
    path: Path
    metric: float | None
    files: Mapping[str, tuple[Path, ...]]
    message: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.files)

    def load(self, part: str, layout: Layout | None = None) -> Any:
        """Tensors by name, or the JSON value.

        layout: how the tensors are to be sharded over the ranks, each of which reads only its own shards, whatever the
        sharding at the save. Without it they are whole. Raises KeyError if the checkpoint has no such part,
        CheckpointError if the part is of another kind than its name says.
        """
        files = self.files[part]
        try:
            return read_part(files, layout)
        except (ValueError, RecursionError, SafetensorError) as err:
            raise CheckpointError(f"the checkpoint {self.path} cannot be read: {files[0].name}: {err}") from err

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns errors inside, caused by a complete checkpoint with unexpected content, into CheckpointError."""
        try:
            yield
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as err:
            what = f"{type(err).__name__}: {err}"
            raise CheckpointError(
                f"the checkpoint {self.path} does not hold what this version of distflow writes ({what}). "
                "Resume with the version that made it, or start anew with --resume never"
            ) from err


class CheckpointStore:
    """The checkpoints of one run. One process begins and commits a checkpoint; any may write parts of it.

    keep_last, keep_best: see `Retention`. on_point: see `Writing`.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int | None = None,
        keep_best: int = 0,
        on_point: Callable[[str], None] = lambda point: None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(
                f"{keep_last} checkpoints cannot be kept: at least 1 must be, or a kill loses the run"
            )
        self.folder = folder
        self._retention = Retention(keep_last, keep_best)
        self._on_point = on_point

    def begin(self, step: int) -> Writing:
        """Begin a checkpoint beside the others; the leftovers of one that was not committed are removed.

        Raises CheckpointError if the folder cannot be written.
        """
        with or_give_up(step, self.folder):
            partial = make_partial(self.folder, step)
        self._on_point("begun")
        return Writing(step, partial, self._retention, self._on_point)

    def writing(self, step: int) -> Writing:
        """Join the checkpoint that another process began. Raises CheckpointError if there is none."""
        partial = partial_of(self.folder, step)
        if partial is None:
            raise CheckpointError(
                f"no checkpoint of step {step} is being written to {self.folder}: if a run has several machines, "
                "all must see that folder (trainer.default_local_dir)"
            )
        return Writing(step, partial, self._retention, self._on_point)

    def load(self, which: Literal["latest"] | int | Path = LATEST) -> Checkpoint:
        """A checkpoint verified against its checksums: the latest, the one of a step, or the one in a folder.

        A folder is a checkpoint's own, or a store's, of which the latest is loaded. If the latest is damaged, the
        newest complete one is loaded, and the checkpoint's `message` says so. Raises CheckpointError if there is none,
        or the one that was named is damaged.
        """
        if which == LATEST:
            return self._load_latest()
        if isinstance(which, int):
            found = [path for path in by_age(self.folder) if read_manifest(path).step == which]
            if not found:
                raise CheckpointError(f"there is no checkpoint of step {which} in {self.folder}. {self._listing()}")
            path = found[-1]
        else:
            path = which
            if CheckpointStore(path).exists():
                return CheckpointStore(path).load()
            if not path.is_dir():
                raise CheckpointError(f"there is no checkpoint {path}: no such folder")
            if not (path / MANIFEST).exists() and path not in checkpoints_in(path.parent):
                raise CheckpointError(
                    f"{path} is no checkpoint, and holds none: name a run's folder that has checkpoints, or one of them"
                )
        try:
            return _open(path)
        except DamagedError as err:
            raise CheckpointError(f"the checkpoint {path} is damaged: {err}. {self._listing()}") from err

    def exists(self) -> bool:
        """Whether anything was ever saved here, complete or damaged."""
        return bool(checkpoints_in(self.folder))

    def remove_leftovers(self) -> None:
        """Remove the leftovers of a killed save or removal. For the process that commits, when it starts.

        Raises CheckpointError if the next save could not become the latest.
        """
        remove_leftovers(self.folder)
        if (self.folder / LATEST).is_dir():
            raise CheckpointError(
                f"{self.folder / LATEST} is a folder, but should be the file that names the newest: move it away"
            )

    def _load_latest(self) -> Checkpoint:
        newest_first = sorted(checkpoints_in(self.folder), key=serial_of, reverse=True)
        wanted = self._latest_name()
        newest_first.sort(key=lambda path: path.name != wanted)
        faults = []
        for path in newest_first:
            try:
                checkpoint = _open(path)
            except DamagedError as err:
                faults.append(f"{path} is damaged ({err})")
                continue
            if faults:
                return replace(checkpoint, message=f"{'; '.join(faults)}: resuming from step {checkpoint.step} instead")
            return checkpoint
        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(faults)}. Start anew with --resume never, "
                "or resume from a copy with --resume PATH"
            )
        raise CheckpointError(f"there is no checkpoint in {self.folder} (trainer.default_local_dir)")

    def _latest_name(self) -> str:
        try:
            with (self.folder / LATEST).open("rb") as file:
                return file.read(_MAX_NAME).decode(errors="replace").strip()
        except OSError:
            return ""

    def _listing(self) -> str:
        names = ", ".join(path.name for path in by_age(self.folder))
        return f"There are: {names}" if names else "There is no other"


def _open(path: Path) -> Checkpoint:
    manifest = verify(path)
    files = defaultdict[str, tuple[Path, ...]](tuple)
    for name in manifest.files:
        files[part_of(name)] += (path / name,)
    return Checkpoint(manifest.step, path, manifest.metric, dict(files))
