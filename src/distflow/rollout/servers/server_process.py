"""A server that is a child of this process, with a private folder for its socket, log, model and
weights."""

import copy
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.processes.child import Child, how_it_ended
from distflow.processes.descendants import descendants, stat_fields
from distflow.scheduling.group_states import Version

_SHARED_MEMORY: Final = Path("/dev/shm")
_FILE_BYTES: Final = 2**28
_SHOWN_LINES: Final = 12
_ERROR: Final = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_TIME_FIELDS: Final = slice(11, 13)  # utime and stime in /proc/PID/stat, after the name


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a version, as a folder of files. hashes: those that a server must report;
    empty if unknown."""

    version: Version
    folder: Path
    hashes: Mapping[str, str] = field(default_factory=dict)


class PrivateFolder:
    """A private folder for as long as a server is used. It is locked meanwhile: creating the next
    one with that prefix removes unlocked ones, which killed processes left behind."""

    def __init__(self, prefix: str) -> None:
        self._locks = dict[Path, int]()
        temporary = Path(tempfile.gettempdir())
        for parent in {temporary, _SHARED_MEMORY}:
            _remove_left(parent.glob(f"{prefix}*"))
        self.path = self._make(prefix, temporary)

    def _make(self, prefix: str, parent: Path) -> Path:
        """Create a folder that gets its final name once locked."""
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        folder = made.with_name(made.name.removeprefix("."))
        self._locks[folder] = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return made.rename(folder)

    def save(self, weights: Iterable[tuple[str, Tensor]], num_bytes: int) -> Path:
        """Write weights as safetensors files into a new folder, which `drop` removes: in shared
        memory if twice as many bytes fit, else on disk. Incomplete weights leave nothing behind."""
        fits = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * num_bytes
        folder = self._make(f"{self.path.name}-", _SHARED_MEMORY if fits else self.path)

        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.drop, folder)
            for number, tensors in enumerate(_files(weights)):
                save_file(tensors, folder / f"{number:05}.safetensors")
            if_it_fails.pop_all()

        return folder

    def drop(self, folder: Path) -> None:
        shutil.rmtree(folder)
        os.close(self._locks.pop(folder))

    def remove(self) -> None:
        for folder, lock in self._locks.items():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        self._locks.clear()


def _remove_left(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's folder, or already gone
            continue

        with suppress(BlockingIOError):  # it is in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)

        os.close(lock)


class ServerProcess:
    """A server and its child processes, which end with `kill`, with this process, or with the
    server itself. If this process ends first, its `PrivateFolder` is removed as well. pid: of the
    process group."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """log: in the server's `PrivateFolder`."""
        self._log = log
        with log.open("wb") as output:
            self._child = Child(
                command,
                {**os.environ, **env},
                stdout=output,
                stderr=output,
                removed=(str(log.parent), f"{_SHARED_MEMORY / log.parent.name}-*"),
            )

        self.pid = self._child.pid

    def is_running(self) -> bool:
        return self._child.status() is None

    def cpu_ticks(self) -> int:
        """The CPU time that all of its processes have used so far."""
        ticks = 0
        for pid, _ in descendants(self._child.pid):
            with suppress(OSError):  # the process has ended
                ticks += sum(map(int, stat_fields(pid)[_TIME_FIELDS]))
        return ticks

    def last_lines(self) -> str:
        """The last lines of its log, earlier errors, and how it ended."""
        lines = self._log.read_text("utf-8", "replace").splitlines()
        errors = [line for line in lines[:-_SHOWN_LINES] if _ERROR.search(line)]
        shown = [*errors[-_SHOWN_LINES:], *lines[-_SHOWN_LINES:]]
        if not self.is_running():
            shown.append(f"the server {how_it_ended(self._child.status())}")
        return "\n".join(f"    {line[:300]}" for line in shown)

    def kill(self) -> None:
        """Kill all of its processes, and wait until they have ended."""
        self._child.end()


def _files(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file, with separate storage, as the format requires."""
    file = dict[str, Tensor]()
    num_bytes = 0
    for name, tensor in weights:
        if file and num_bytes + tensor.nbytes > _FILE_BYTES:
            yield file
            file = {}
            num_bytes = 0

        here = tensor.detach().cpu().contiguous()
        is_shared = any(here.data_ptr() == other.data_ptr() for other in file.values())
        file[name] = here.clone() if is_shared else here
        num_bytes += tensor.nbytes

    yield file


def write_model(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Write config and tokenizer, without weights, for a server to start with."""
    target = folder / "model"
    if not target.exists():
        config: Any = copy.copy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(target)
        tokenizer.save_pretrained(target)

    return target


def find_package(python: str | None, *names: str) -> str:
    """The first of these packages that is installed for an interpreter, as `NAME==VERSION`; else
    why there is none. python: None is this one."""
    ask = (
        "from importlib.metadata import distributions as d\n"
        f"print(*(f'{{x.name}}=={{x.version}}' for x in d() if x.name in {names!r}))"
    )
    try:
        run = subprocess.run(
            [python or sys.executable, "-c", ask], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)

    why = run.stderr.strip()[-300:]
    return run.stdout.strip() or f"no {names[0]}{why and f' ({why})'}"
