"""Checkpoints are complete or absent. After a kill at any point, a full disk or a flipped bit, one
that loads remains.

FOLDER/step-000012/ has one file per part, or one for each rank that has shards of it, and
manifest.json with their sizes and checksums. Until then it is step-000012.partial.

Each process writes its own parts of a checkpoint; one process commits them all.
"""

import errno
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError

from distflow.errors import UserError, resume_advice
from distflow.observe.crash_safe_files import sync
from distflow.runtime.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    DamagedError,
    Layout,
    Manifest,
    by_age,
    checkpoints_in,
    describe,
    next_serial,
    part_of,
    partial_of,
    parts_in,
    read_manifest,
    read_part,
    remove,
    remove_leftovers,
    verify,
    write_manifest,
    write_part,
)

_NAME: Final = re.compile(r"\w+(-rank\d+)?")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNEXPECTED: Final = (
    OSError,
    SafetensorError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RuntimeError,
    RecursionError,
)
"""What code raises that reads a file of another content than it expects."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    path: Path
    metric: float | None
    files: Mapping[str, tuple[Path, ...]]
    """By part."""
    message: str = ""
    """What to tell the user if it is not the requested one."""

    def load(self, part: str, layout: Layout | None = None) -> Any:
        """Tensors by name, or the JSON value.

        layout: the sharding of the tensors over the ranks, each of which reads only its own shards,
        whatever the sharding was when saved. Without it, tensors are whole. Raises KeyError if the
        checkpoint has no such part, CheckpointError if the part is not of the kind that its name
        says.
        """
        files = self.files[part]
        with self.reading():
            return read_part(files, layout)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns errors inside, caused by a complete checkpoint with unexpected content, into
        CheckpointError."""
        try:
            yield
        except UserError:
            raise
        except _UNEXPECTED as err:
            raise CheckpointError(
                f"the checkpoint {self.path} does not have the format of this version of distflow "
                f"({type(err).__name__}: {err}). Resume with the version that wrote it, or start "
                f"again with {resume_advice('never')}"
            ) from err


@dataclass(frozen=True)
class Writing:
    """A checkpoint that `CheckpointStore.begin` began, in the folder `partial`."""

    store: "CheckpointStore"
    step: int
    partial: Path

    def write(self, name: str, part: object) -> None:
        """Write one part: tensors by name, this rank's shards of them, or a JSON value. It is on
        disk when this returns.

        name: also the file's, unique over processes; for shards, `shard_name` makes it. Raises
        CheckpointError if the disk is full or not writable, or another process abandoned the
        checkpoint: it is then abandoned, and earlier ones remain.
        """
        assert name != "manifest" and _NAME.fullmatch(name), (
            f"a part's name becomes a file's: {name!r}"
        )
        with or_give_up(self.step, self.store.folder):
            write_part(self.partial, name, part)
            self.store.on_point(f"part {name}")

    def commit(
        self,
        expected: Collection[str],
        metric: float | None = None,
        keep_waiting: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Make it the latest checkpoint, then remove old ones. For one process, after the others
        have written.

        expected: the names of all parts. metric: higher is better; one that is not finite counts as
        none. keep_waiting: called repeatedly while parts of other processes are missing; blocks for
        a while. Returns its folder once it is on disk. Raises CheckpointError if a part is missing,
        or as `write` does; then nothing is committed.
        """
        with or_give_up(self.step, self.store.folder):
            # a process that could not write removed the checkpoint
            while self._missing(expected) and self.partial.exists() and keep_waiting():
                pass
            folder = self.store.folder

            # a part may have arrived during the last wait
            if missing := self._missing(expected):
                with suppress(OSError):
                    remove(self.partial)
                raise CheckpointError(
                    f"the checkpoint of step {self.step} was not written to {folder}: "
                    f"{', '.join(missing)} missing, because its process failed or died. Earlier "
                    "checkpoints are complete"
                )

            files = {path.name: describe(path) for path in parts_in(self.partial)}
            score = None
            if metric is not None and math.isfinite(metric):
                score = metric

            write_manifest(self.partial, Manifest(self.step, next_serial(folder), score, files))
            self.store.on_point("manifest")
            final = self.partial.with_suffix("")
            remove(final)  # one that was damaged, or abandoned by a rollback
            self.partial.rename(final)
            sync(folder)
            self.store.on_point("renamed")
            self._remove_old()
            return final

    def _missing(self, expected: Collection[str]) -> list[str]:
        return sorted(set(expected) - {path.stem for path in parts_in(self.partial)})

    def _remove_old(self) -> None:
        """Keep only the newest few and the best few; the one just written always stays."""
        if self.store.keep_last is None:
            return

        paths = by_age(self.store.folder)
        metrics = dict[Path, float]()
        for path in paths:
            metric = read_manifest(path).metric
            if metric is not None:
                metrics[path] = metric

        best = sorted(metrics, key=metrics.__getitem__, reverse=True)
        kept = {*paths[-self.store.keep_last :], *best[: self.store.keep_best]}

        for path in paths:
            if path not in kept and not path.is_symlink():
                self.store.on_point(f"removing {path.name}")
                remove(path)


class CheckpointStore:
    """The checkpoints of one run. One process begins and commits a checkpoint; any may write parts
    of it.

    keep_last: how many of the newest to keep, at least 1; None for all. keep_best: how many more
    with the highest metric. on_point: called with the name of each point that a write reaches, to
    inject faults there.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int | None = None,
        keep_best: int = 0,
        on_point: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.on_point = on_point

    def begin(self, step: int) -> Writing:
        """Begin a checkpoint beside the others, after removing leftovers of uncommitted ones.

        Raises CheckpointError if the folder cannot be written.
        """
        with or_give_up(step, self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            partial_of(self.folder, step).mkdir(mode=0o700)
        self.on_point("begun")
        return self.writing(step)

    def writing(self, step: int) -> Writing:
        """Join the checkpoint that another process began. Raises CheckpointError if there is
        none."""
        partial = partial_of(self.folder, step)
        if not partial.is_dir():
            raise CheckpointError(
                f"no checkpoint of step {step} is being written to {self.folder}: with several "
                "machines, all must have access to that folder (trainer.default_local_dir)"
            )

        return Writing(self, step, partial)

    def load(self, which: int | Path | None = None) -> Checkpoint:
        """A checkpoint verified against its checksums: the newest, the one of a step, or the one in
        a folder.

        A folder is a checkpoint's, or a store's, whose newest is loaded. If the newest is damaged,
        the newest complete one is loaded, and its `message` says so. Raises CheckpointError if
        there is none, or the requested one is damaged.
        """
        if which is None:
            return self._load_newest()

        if isinstance(which, int):
            found = [path for path in by_age(self.folder) if read_manifest(path).step == which]
            if not found:
                raise CheckpointError(
                    f"there is no checkpoint of step {which} in {self.folder}. {self._listing()}"
                )
            path = found[-1]
        else:
            path = which
            if CheckpointStore(path).exists():
                return CheckpointStore(path).load()
            if not path.is_dir():
                raise CheckpointError(f"there is no checkpoint {path}: no such folder")
            if not (path / MANIFEST).exists() and path not in checkpoints_in(path.parent):
                raise CheckpointError(
                    f"{path} is not a checkpoint and contains none: name a run's folder, or a "
                    "checkpoint"
                )

        try:
            return _open(path)
        except DamagedError as err:
            raise CheckpointError(
                f"the checkpoint {path} cannot be read: {err}. {self._listing()}"
            ) from err

    def exists(self) -> bool:
        return bool(checkpoints_in(self.folder))

    def remove_leftovers(self) -> None:
        """Remove the leftovers of a killed save or removal. For the process that commits, when it
        starts."""
        remove_leftovers(self.folder)

    def _load_newest(self) -> Checkpoint:
        newest_first = by_age(self.folder)[::-1]

        # without their manifests nobody knows their age
        unreadable = [path for path in checkpoints_in(self.folder) if path not in newest_first]

        faults = []
        for path in [*unreadable, *newest_first]:
            try:
                checkpoint = _open(path)
            except DamagedError as err:
                faults.append(f"{path} is damaged ({err})")
                continue

            if not faults:
                return checkpoint
            message = f"{'; '.join(faults)}: using step {checkpoint.step} instead"
            return replace(checkpoint, message=message)

        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is complete: {'; '.join(faults)}. Start again "
                f"with {resume_advice('never')}, or resume from a copy with {resume_advice('PATH')}"
            )

        raise CheckpointError(
            f"there is no checkpoint in {self.folder} (trainer.default_local_dir)"
        )

    def _listing(self) -> str:
        names = ", ".join(path.name for path in by_age(self.folder))
        if names:
            return f"There are: {names}"
        return "There is no other"


@contextmanager
def or_give_up(step: int, folder: Path) -> Iterator[None]:
    """If a write fails, remove its partial checkpoint, which also frees the disk, and ends the
    writes of other processes."""
    try:
        yield
    except (OSError, SafetensorError) as err:
        cause = str(err)

        # safetensors reports the system's errors only as text
        if any(os.strerror(number) in cause for number in _FULL):
            cause = "the disk is full"
        with suppress(OSError):  # the write's own failure is the one to report
            remove_leftovers(folder)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {cause}. Earlier "
            "checkpoints are complete. Free space, or set trainer.default_local_dir to another "
            "folder; then rerun the command"
        ) from err


def _open(path: Path) -> Checkpoint:
    manifest = verify(path)
    files = defaultdict[str, tuple[Path, ...]](tuple)
    for name in manifest.files:
        files[part_of(name)] += (path / name,)
    return Checkpoint(manifest.step, path, manifest.metric, dict(files))
