"""Compiles this folder's C for this processor with the machine's C compiler, once for all runs, and
calls its functions."""

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_info
from torch import Tensor

from distflow.untrusted_files import own_cache

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC") + (
    # By default compilers make loops half as wide as the products.
    ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
)
LONGEST_S = 60.0
ADDRESS = ctypes.c_void_p
COUNT = ctypes.c_int64


class NotNative(Exception):
    """There is no native code for this machine or model; the message says why."""


def library() -> ctypes.CDLL:
    """The library, compiled now or taken from the user's cache. Raises NotNative."""
    found = outcome()
    if isinstance(found, NotNative):
        raise found
    return found


def is_there() -> bool:
    return not isinstance(outcome(), NotNative)


@functools.cache
def outcome() -> ctypes.CDLL | NotNative:
    """The library, or why there is none; tried once per process."""
    try:
        return _load()
    except NotNative as reason:
        return reason


def _load() -> ctypes.CDLL:
    if platform.system() != "Linux":
        raise NotNative(f"it requires Linux, but this is {platform.system()}")

    compiler = shutil.which("cc")
    if compiler is None:
        raise NotNative("there is no C compiler `cc` on the PATH (Debian's package is named gcc)")

    # Make the code find the OpenMP that torch uses: a second one would have its own threads.
    loaded = [pool["filepath"] for pool in threadpool_info() if pool["user_api"] == "openmp"]
    if len(loaded) != 1:
        raise NotNative(
            f"it requires a single OpenMP library (torch's), but this process has {len(loaded)}"
        )

    ctypes.CDLL(loaded[0], mode=ctypes.RTLD_GLOBAL)
    try:
        path = own_cache() / f"native-{_digest(compiler)}.so"
    except OSError as error:
        raise NotNative(f"there is no cache for compiled code: {error.strerror}") from None

    if not path.exists():
        _compile(compiler, path)

    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotNative(f"the library compiled by {compiler} cannot be loaded: {error}") from None


def name() -> str:
    """The name of the code, from everything that its results depend on; "torch" if there is
    none."""
    found = outcome()
    if isinstance(found, NotNative):
        return "torch"
    return Path(found._name).stem


def _digest(compiler: str) -> str:
    """A hash of everything that the result depends on; different machines may share a home
    folder."""
    features = {
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("flags", "Features"))
    }
    sources = [path.read_text("utf-8") for path in sorted(FOLDER.glob("*.[ch]"))]
    parts = (*sources, _run(compiler, "--version"), " ".join(FLAGS), *sorted(features))

    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled = [Path(folder) / f"{source.stem}.o" for source in FOLDER.glob("*.c")]
        for each in compiled:
            _run(compiler, *FLAGS, "-c", str(FOLDER / f"{each.stem}.c"), "-o", str(each))

        # Without -fopenmp: the OpenMP library is found at load time.
        linked = Path(folder) / "native.so"
        _run(compiler, "-shared", *map(str, compiled), "-o", str(linked))
        linked.replace(path)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotNative(f"{command[0]} cannot be run: {error}") from None

    if done.returncode:
        raise NotNative(f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def call(name: str, *arguments: Any) -> int:
    """Run a C function, whose last argument is the number of threads. arguments: tensors (None for
    a missing one), structures, integers, and C values. Raises NotNative."""
    return getattr(library(), name)(*map(_of_c, arguments), COUNT(torch.get_num_threads()))


def size(name: str, *arguments: Any) -> int:
    """The result of a C function that computes a size. arguments: as in `call`. Raises
    NotNative."""
    function = getattr(library(), name)
    function.restype = COUNT
    return function(*map(_of_c, arguments))


def _of_c(value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return ADDRESS(address(value))
    if isinstance(value, ctypes.Structure):
        return ctypes.byref(value)
    return COUNT(value) if isinstance(value, int) else value


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def addresses(*names: str) -> list[tuple[str, type]]:
    """Fields of a structure."""
    return [(name, ADDRESS) for name in names]


def counts(*names: str) -> list[tuple[str, type]]:
    """Fields of a structure."""
    return [(name, COUNT) for name in names]
