"""Checkpoints: whole or not there. A kill at any point, a full disk or a flipped bit leaves one that loads.

FOLDER/step-000012/   one file a part, and manifest.json with their sizes and checksums
FOLDER/latest         the name of the newest, moved last
"""

import errno
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from safetensors import SafetensorError

from distflow.config.errors import UserError
from distflow.observe.files import sync, write_atomically
from distflow.runtime.checkpoint_files import (
    DamagedError,
    Manifest,
    Part,
    describe,
    read_manifest,
    read_part,
    verify,
    write_manifest,
    write_part,
)

LATEST: Final = "latest"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTIAL, REMOVED = ".partial", ".removed"


class CheckpointError(UserError):
    """A checkpoint could not be written, or none could be read."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole. message: what to tell the user where it is not the one that was asked for."""

    step: int
    path: Path
    metric: float | None
    files: Mapping[str, Path]
    message: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.files)

    def load(self, part: str) -> Any:
        """Tensors by name, or the JSON value. Raises KeyError where the checkpoint has no such part."""
        return read_part(self.files[part])


class CheckpointStore:
    """The checkpoints of one run, written by one process.

    keep_last: how many of the newest to keep, None for all. keep_best: how many of those with the highest metric to
    keep besides. on_point: called with the name of each point of `save` that it has reached, to inject faults there.
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
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._on_point = on_point

    def save(self, step: int, parts: Mapping[str, Part], metric: float | None = None) -> Path:
        """Write a checkpoint beside the others, then make it the latest, then let old ones go.

        parts: by name, which is also the file's. metric: higher is better; one that is not finite counts as none.
        Returns its folder once it is on the disk. Raises CheckpointError where the disk is full or cannot be written:
        the checkpoints that were there are still there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.remove_leftovers()
            return self._save(step, parts, metric if metric is not None and math.isfinite(metric) else None)
        except (OSError, SafetensorError) as err:
            self._forget_partial()
            raise CheckpointError(self._write_failure(step, err)) from err

    def load(self, which: Literal["latest"] | int | Path = LATEST) -> Checkpoint:
        """A checkpoint verified against its checksums: the latest, that of a step, or that in a folder.

        A folder is a checkpoint's own, or a store's, of which the latest is taken. A damaged latest one is passed
        over for the newest whole one, and the checkpoint's `message` says so. Raises CheckpointError where there is
        none, or the one that was named is damaged.
        """
        if which == LATEST:
            return self._load_latest()
        if isinstance(which, int):
            found = [path for path in self._by_age() if read_manifest(path).step == which]
            if not found:
                raise CheckpointError(f"there is no checkpoint of step {which} in {self.folder}. {self._listing()}")
            path = found[-1]
        else:
            path = which
            if CheckpointStore(path).exists():
                return CheckpointStore(path).load()
            if not path.is_dir():
                raise CheckpointError(f"there is no checkpoint {path}: no such folder")
        try:
            return _open(path)
        except DamagedError as err:
            raise CheckpointError(f"the checkpoint {path} is damaged: {err}. {self._listing()}") from err

    def exists(self) -> bool:
        """Whether anything was ever saved here, whole or damaged."""
        return self.folder.is_dir() and any(_is_checkpoint(path) for path in self.folder.iterdir())

    def remove_leftovers(self) -> None:
        """Remove what a killed save or removal left. For the process that writes here, when it starts."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.endswith((PARTIAL, REMOVED)):
                    _remove(path)

    def _save(self, step: int, parts: Mapping[str, Part], metric: float | None) -> Path:
        known = self._by_age()
        serial = read_manifest(known[-1]).serial + 1 if known else 0
        final = self.folder / f"step-{step:06d}"
        if final.exists():
            final = self.folder / f"step-{step:06d}-{serial}"
        partial = self.folder / (final.name + PARTIAL)
        partial.mkdir()
        self._on_point("begun")

        files = {}
        for name, part in parts.items():
            assert name != "manifest" and name.replace("_", "").isalnum(), f"a part's name becomes a file's: {name!r}"
            path = write_part(partial, name, part)
            files[path.name] = describe(path)
            self._on_point(f"part {name}")
        write_manifest(partial, Manifest(step, serial, metric, files))
        self._on_point("manifest")

        partial.rename(final)
        self._on_point("renamed")
        sync(self.folder)
        write_atomically(self.folder / LATEST, final.name.encode())
        self._on_point("latest")
        self._retain()
        return final

    def _retain(self) -> None:
        """Only the newest few and the best few stay. The newest, which was just written, always does."""
        if self._keep_last is None:
            return
        paths = self._by_age()
        metrics = {path: metric for path in paths if (metric := read_manifest(path).metric) is not None}
        best = sorted(metrics, key=lambda path: metrics[path], reverse=True)
        kept = {*paths[-self._keep_last :], *best[: self._keep_best]}
        for path in self._all():
            if path not in kept:
                aside = path.with_name(path.name + REMOVED)
                path.rename(aside)
                self._on_point(f"removing {path.name}")
                _remove(aside)

    def _load_latest(self) -> Checkpoint:
        newest_first = sorted(self._all(), key=_serial, reverse=True)
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
                return _with_message(checkpoint, f"{'; '.join(faults)}: going on from step {checkpoint.step} instead")
            return checkpoint
        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(faults)}. Start anew with --resume never, "
                "or go on from a copy with --resume PATH"
            )
        raise CheckpointError(f"there is no checkpoint in {self.folder} (trainer.default_local_dir)")

    def _latest_name(self) -> str:
        try:
            return (self.folder / LATEST).read_text().strip()
        except OSError:
            return ""

    def _all(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if _is_checkpoint(path)) if self.folder.is_dir() else []

    def _by_age(self) -> list[Path]:
        """Checkpoints whose manifests can be read, oldest first."""
        return sorted((path for path in self._all() if _serial(path) >= 0), key=_serial)

    def _forget_partial(self) -> None:
        try:
            self.remove_leftovers()
        except OSError:
            return  # the failure of the save itself is the one to tell

    def _listing(self) -> str:
        names = ", ".join(path.name for path in self._by_age())
        return f"There are: {names}" if names else "There is no other"

    def _write_failure(self, step: int, err: Exception) -> str:
        # safetensors tells the system's errors by their text alone
        full = getattr(err, "errno", None) in _FULL or any(os.strerror(number) in str(err) for number in _FULL)
        cause = "the disk is full" if full else str(err)
        return (
            f"the checkpoint of step {step} could not be written to {self.folder}: {cause}. Those before it "
            "are whole. Free space, or set trainer.default_local_dir to another folder; then start again"
        )


def _open(path: Path) -> Checkpoint:
    manifest = verify(path)
    files = {Path(name).stem: path / name for name in manifest.files}
    return Checkpoint(manifest.step, path, manifest.metric, files)


def _with_message(checkpoint: Checkpoint, message: str) -> Checkpoint:
    return Checkpoint(checkpoint.step, checkpoint.path, checkpoint.metric, checkpoint.files, message)


def _serial(path: Path) -> int:
    """When a checkpoint was made among the others; -1 where its manifest cannot be read."""
    try:
        return read_manifest(path).serial
    except DamagedError:
        return -1


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith("step-") and not path.name.endswith((PARTIAL, REMOVED)) and path.is_dir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
