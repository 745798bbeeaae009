"""A checkpoint while it is written: each process writes its own parts, one process commits them all."""

import errno
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from distflow.observe.files import sync, write_atomically
from distflow.runtime.checkpoint.files import FileEntry, Manifest, describe, read_manifest, write_manifest, write_part
from distflow.runtime.checkpoint.folder import (
    BEGUN,
    LATEST,
    PARTIAL,
    REMOVED,
    CheckpointError,
    by_age,
    next_serial,
    parts_in,
    remove_checkpoint,
    remove_leftovers,
    remove_partial,
)

_NAME: Final = re.compile(r"\w+(-rank\d+)?")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class GivenUp(CheckpointError):
    """Another process could not write its part, and reports why."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(
            f"the checkpoint of step {step} was not written to {folder}: another process could not write its part of "
            "it, and reports why. Earlier ones are complete"
        )


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept. keep_last: how many of the newest, None for all. keep_best: in addition, how many
    with the highest metric."""

    keep_last: int | None = None
    keep_best: int = 0


@dataclass(frozen=True)
class Writing:
    """A checkpoint that `CheckpointStore.begin` began, in the folder `partial`.

    on_point: called with the name of each point that is reached, to inject faults there.
    """

    step: int
    partial: Path
    retention: Retention
    on_point: Callable[[str], None]

    def write(self, name: str, part: object) -> None:
        """Write one part: tensors by name, this rank's shards of them, or a JSON value. It is on the disk when this
        returns.

        name: also the file's; no two processes write the same, and `shard_name` makes it for shards. Raises
        CheckpointError if the disk is full or cannot be written, or another process abandoned the checkpoint: it is
        abandoned, and earlier ones are still there.
        """
        assert name != "manifest" and _NAME.fullmatch(name), f"a part's name becomes a file's: {name!r}"
        with or_give_up(self.step, self.partial.parent, self._given_up):
            write_part(self.partial, name, part)
            self.on_point(f"part {name}")

    def commit(
        self,
        expected: Collection[str],
        metric: float | None = None,
        keep_waiting: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Make it the latest checkpoint, then remove old ones. For one process, after the others have written.

        expected: the names of all parts. metric: higher is better; one that is not finite counts as none.
        keep_waiting: called repeatedly, and blocks for a while, as long as parts of other processes are missing.
        Returns its folder once it is on the disk. Raises CheckpointError if a part is missing, or as `write`: then
        nothing is committed.
        """
        with or_give_up(self.step, self.partial.parent):
            while self._missing(expected) and not self._given_up() and keep_waiting():
                pass
            files = self._files(expected)
            folder = self.partial.parent
            score = metric if metric is not None and math.isfinite(metric) else None
            write_manifest(self.partial, Manifest(self.step, next_serial(folder), score, files))
            (self.partial / BEGUN).unlink()
            self.on_point("manifest")
            final = self.partial.with_name(self.partial.name.removesuffix(PARTIAL))
            self.partial.rename(final)
            self.on_point("renamed")
            sync(folder)
            write_atomically(folder / LATEST, final.name.encode())
            self.on_point("latest")
            self._retain(folder)
            return final

    def _files(self, expected: Collection[str]) -> dict[str, FileEntry]:
        missing = self._missing(expected)
        if missing and self._given_up():
            raise GivenUp(self.step, self.partial.parent)
        if missing:
            with suppress(OSError):
                remove_partial(self.partial)
            raise CheckpointError(
                f"the checkpoint of step {self.step} was not written to {self.partial.parent}: {', '.join(missing)} "
                "missing, as the process that was to write it failed or is gone. Earlier ones are complete"
            )
        return {path.name: describe(path) for path in parts_in(self.partial)}

    def _missing(self, expected: Collection[str]) -> list[str]:
        return sorted(set(expected) - {path.stem for path in parts_in(self.partial)})

    def _given_up(self) -> bool:
        """Whether a process that could not write removed the checkpoint."""
        return not (self.partial / BEGUN).exists()

    def _retain(self, folder: Path) -> None:
        """Keep only the newest few and the best few. The newest, which was just written, always stays."""
        if self.retention.keep_last is None:
            return
        paths = by_age(folder)
        metrics = {path: metric for path in paths if (metric := read_manifest(path).metric) is not None}
        best = sorted(metrics, key=lambda path: metrics[path], reverse=True)
        kept = {*paths[-self.retention.keep_last :], *best[: self.retention.keep_best]}
        for path in paths:
            aside = path.with_name(path.name + REMOVED)
            somebodys = path.is_symlink() or aside.exists()  # our own leftovers are gone by now
            if path not in kept and not somebodys:
                path.rename(aside)
                self.on_point(f"removing {path.name}")
                remove_checkpoint(aside)


@contextmanager
def or_give_up(step: int, folder: Path, given_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """If a write fails, remove what was written of its checkpoint, which also frees the disk.

    given_up: whether another process did so already, which made this write fail.
    """
    try:
        yield
    except (OSError, SafetensorError) as err:
        failure = GivenUp(step, folder) if given_up() else CheckpointError(_failure(step, folder, err))
        with suppress(OSError):  # the failure of the write itself is the one to report
            remove_leftovers(folder)
        raise failure from err


def _failure(step: int, folder: Path, err: Exception) -> str:
    # safetensors reports the system's errors by their text alone
    full = getattr(err, "errno", None) in _FULL or any(os.strerror(number) in str(err) for number in _FULL)
    cause = "the disk is full" if full else str(err)
    return (
        f"the checkpoint of step {step} could not be written to {folder}: {cause}. Earlier ones "
        "are complete. Free space, or set trainer.default_local_dir to another folder; then start again"
    )
