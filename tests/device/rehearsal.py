"""Builds the rehearsal's device once for all tests, and runs tests with it in processes of their
own: a device that is registered in a process stays, and `trainer.device=auto` would find it."""

import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import forks

CODE, MODULE = (Path(__file__).parent / name for name in ("rehearsal.cpp", "torch_rehearsal.py"))
LIBRARY = "rehearsal_backend.so"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared")
DEADLINE_S = 500.0


@functools.cache
def build() -> Path:
    """The folder to import the device from; skips the test where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip(
            "the rehearsal's device is C++: it wants the compiler `g++` on the PATH (Debian's "
            "package is g++)"
        )

    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
    what = [
        compiler,
        version,
        *FLAGS,
        torch.__version__,
        torch.__file__,
        sys.version,
        CODE.read_text(),
    ]
    library = _made(what, functools.partial(_compile, compiler))

    return _made([*what, MODULE.read_text()], functools.partial(_write_package, library))


def _made(of: list[str], make: Callable[[Path], None]) -> Path:
    """The folder that was made of these, now or earlier."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distflow-rehearsal"
    made = caches / hashlib.blake2b(repr(of).encode(), digest_size=8).hexdigest()
    caches.mkdir(parents=True, exist_ok=True)

    with (caches / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=caches) as temporary:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles, and the others wait
        if not made.exists():
            folder = Path(temporary) / "made"
            folder.mkdir()
            make(folder)
            folder.rename(made)

    return made


def _compile(compiler: str, folder: Path) -> None:
    of_torch = Path(torch.__file__).parent
    includes = (
        of_torch / "include",
        of_torch / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    )
    libraries = ("torch", "torch_cpu", "torch_python", "c10")
    command = [
        *(
            compiler,
            *FLAGS,
            "-DTORCH_EXTENSION_NAME=rehearsal_backend",
            *(f"-I{path}" for path in includes),
        ),
        *(str(CODE), f"-L{of_torch}/lib", *(f"-l{name}" for name in libraries)),
        *(f"-Wl,-rpath,{of_torch}/lib", "-o", str(folder / LIBRARY)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]


def _write_package(library: Path, folder: Path) -> None:
    """As `pip install` would: `import torch` loads the device wherever the folder is on the
    path."""
    shutil.copy(MODULE, folder)
    (folder / LIBRARY).symlink_to(library / LIBRARY)
    of_package = folder / "torch_rehearsal-1.dist-info"
    of_package.mkdir()
    (of_package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch-rehearsal\nVersion: 1\n"
    )
    (of_package / "entry_points.txt").write_text(
        "[torch.backends]\nrehearsal = torch_rehearsal:load\n"
    )


def load_device() -> None:
    """Register the device in this process, and for those that it starts."""
    folder = str(build())
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    importlib.import_module("torch_rehearsal").load()


def on_device(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test, in a process with the device. Fixtures must be such as can be pickled."""

    @functools.wraps(test)
    def in_a_process(**fixtures: Any) -> None:
        build()
        ours, theirs = forks.Pipe(duplex=False)
        process = forks.Process(
            target=_run, args=(theirs, test.__module__, test.__name__, fixtures)
        )
        process.start()
        theirs.close()
        process.join(DEADLINE_S)

        if process.is_alive():
            process.kill()
            pytest.fail(f"{test.__name__} did not end within {DEADLINE_S:.0f} s")

        assert process.exitcode == 0, (
            ours.recv() if ours.poll() else f"it ended with status {process.exitcode}"
        )

    return in_a_process


def _run(results: Connection, module: str, name: str, fixtures: dict[str, Any]) -> None:
    try:
        load_device()
        getattr(importlib.import_module(module), name).__wrapped__(**fixtures)
    except BaseException:  # the process that waits shows it
        results.send(traceback.format_exc())
        sys.exit(1)
