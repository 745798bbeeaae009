"""A shell in separate folders: commands may start processes and write files, under bubblewrap,
without a network.

They see the programs in `/usr` and the Python that runs distflow, read-only, and nothing else of
this machine. The files of an episode last until it is closed; the processes of a command end with
it.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from distflow.errors import UserError
from distflow.sandbox.interface import SandboxFault

MEMORY_MB = 4096
_FILE_BLOCKS = 2**21  # blocks of 512 bytes: a file has at most 1 GiB
_READ_BYTES = 64 * 2**10
_SHELL = (
    'echo 1000 2>/dev/null >/proc/self/oom_score_adj; ulimit -c 0; ulimit -f "$1"; ulimit -d "$2"; '
    'shift 2; exec "$@"'
)
_NAMESPACES = (
    "--unshare-all --die-with-parent --new-session --cap-drop ALL --clearenv --hostname sandbox "
    "--ro-bind /usr /usr"
)
_DEVICES = f"--proc /proc --dev /dev --size {64 * 2**20} --tmpfs /dev/shm --remount-ro /dev"
_SYSTEM = (
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)


class Ran(NamedTuple):
    """How a command ended."""

    exit_code: int | None
    """None if the deadline ended it."""
    output: str
    """Of both streams, cut."""


class Shell:
    """Folders at `workdir` and `/tmp` in which commands run. Its creator closes it, which leaves
    nothing behind."""

    def __init__(self, workdir: str, memory_mb: int | None = None) -> None:
        """memory_mb: of each process."""
        self._workdir = workdir
        self._memory_mb = memory_mb or MEMORY_MB
        self._root = Path(mkdtemp(prefix="distflow-shell-"))
        self.files = self._root / "files"
        self.temporary = self._root / "tmp"
        for folder in (self.files, self.temporary):
            folder.mkdir()

    async def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        max_bytes: int,
        env: Mapping[str, str],
        mounts: Sequence[tuple[str, Path, str]] = (),
    ) -> Ran:
        """mounts: "--bind" or "--ro-bind", folder, and where. Raises SandboxFault if the command
        could not be run."""
        for folder in (self.files, self.temporary):
            os.chmod(folder, 0o700)  # a command may have made it unreadable

        status, theirs = os.pipe()
        with open(status, "rb", buffering=0) as told:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._words(theirs, command, env, mounts),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
            finally:
                os.close(theirs)

            output = bytearray()
            reading = asyncio.ensure_future(_read(process.stdout, output, max_bytes))
            try:
                await asyncio.wait((reading,), timeout=timeout_s)
                is_late = not reading.done()
            finally:
                if not reading.done():
                    # processes that it started die with bubblewrap
                    with suppress(ProcessLookupError):
                        process.kill()
                await reading
                await process.wait()

            how = told.read(_READ_BYTES)

        text = output.decode("utf-8", "replace")
        if not is_late and b'"exit-code"' not in how:
            raise SandboxFault(
                "bubblewrap ran no command: "
                f"{text[-500:].strip() or f'status {process.returncode}'}"
            )

        return Ran(None if is_late else process.returncode, text)

    def folder(self) -> Path:
        """A new folder for a mount."""
        return Path(mkdtemp(dir=self._root))

    def check(self) -> None:
        """Raises UserError, with what to install, if commands cannot be isolated."""
        try:
            words = self._words(1, ("/bin/bash", "-c", "true"), {}, ())
            ran = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
            )
            problem = ran.stderr.strip()[-500:] if ran.returncode else ""
        except (SandboxFault, OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)

        if problem:
            raise UserError(
                "commands of tasks cannot run here, because they would not be isolated "
                f"({problem}): they need bubblewrap (apt-get install bubblewrap) and a machine "
                "that lets users make namespaces"
            )

    def _words(
        self,
        status: int,
        command: Sequence[str],
        env: Mapping[str, str],
        mounts: Sequence[tuple[str, Path, str]],
    ) -> list[str]:
        """status: the descriptor for how the command ended. Raises SandboxFault without
        bubblewrap."""
        words = [
            "/bin/sh",
            "-c",
            _SHELL,
            "sh",
            str(_FILE_BLOCKS),
            str(self._memory_mb * 1024),
            *_bubblewrap(status),
        ]
        own = ("--bind", self.temporary, "/tmp"), ("--bind", self.files, self._workdir)
        for kind, folder, at in (*own, *mounts):
            words += [kind, str(folder), at]
        for name, value in env.items():
            words += ["--setenv", name, value]

        return [*words, "--remount-ro", "/", "--chdir", self._workdir, "--", *command]

    def close(self) -> None:
        """Idempotent."""
        # folders at any depth, and unreadable ones
        for words in (["/bin/chmod", "-R", "u+rwX"], ["/bin/rm", "-rf"]):
            command = [*words, "--", str(self._root)]
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )


async def _read(stream: asyncio.StreamReader | None, into: bytearray, most: int) -> None:
    """Read until the last process that could write has ended."""
    assert stream is not None
    while part := await stream.read(_READ_BYTES):
        into += part[: most - len(into)]


def _bubblewrap(status: int) -> list[str]:
    """Arguments up to the episode's folders. Raises SandboxFault. status: the descriptor for how a
    command ended."""
    if (bwrap := shutil.which("bwrap")) is None:
        raise SandboxFault("bubblewrap is not installed (its program is 'bwrap')")

    words = [bwrap, *_NAMESPACES.split(), "--json-status-fd", str(status)]
    for path in _SYSTEM:
        words += (
            ["--symlink", os.readlink(path), path]
            if os.path.islink(path)
            else ["--ro-bind-try", path, path]
        )

    pythons = dict.fromkeys(
        prefix for prefix in (sys.base_prefix, sys.prefix) if not prefix.startswith("/usr")
    )
    for prefix in pythons:
        words += ["--ro-bind", prefix, prefix]
    paths = (f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin")
    words += [*_DEVICES.split(), "--setenv", "PATH", ":".join(paths)]

    return [*words, "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"]
