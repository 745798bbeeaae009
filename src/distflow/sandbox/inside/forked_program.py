"""The forked child: it isolates itself, reports that, and runs the program."""

import atexit
import builtins
import gc
import json
import linecache
import os
import random
import site
import struct
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from distflow.sandbox.inside.isolation import (
    Isolation,
    close_from,
    die_with,
    restrict_files,
    restrict_use,
)
from distflow.sandbox.inside.program_messages import (
    MAX_BYTES,
    NotPlain,
    from_text,
    read_frame,
    to_text,
    write_frame,
)

EXIT_OUT_OF_MEMORY = 86
ANSWERS = 3
"""The descriptor for results, which only a session has."""
FILE = "program.py"
# The C function that `random.seed` calls. Without it all programs would have the server's state.
_seed = super(random.Random, random._inst).seed
_SHOWN_TEXT = 2000


def prepare() -> None:
    """Prepare, once in the server for all programs: standard streams on descriptors 0, 1 and 2,
    `exit` (which `site` would define), and no importable distflow modules."""
    os.dup2(os.memfd_create(""), 0)
    for number in (1, 2):
        os.dup2(os.pipe()[1], number)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = (  # type: ignore[misc]
        # as long as the process
        open(0, encoding="utf-8", errors="surrogateescape", closefd=False),  # noqa: SIM115
        open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False),  # noqa: SIM115
        open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False),  # noqa: SIM115
    )
    os.environ.clear()  # it contains variables of the shell and the interpreter
    site.setquit()

    for ours in [
        name for name in sys.modules if name.partition(".")[0] in ("__main__", "distflow")
    ]:
        del sys.modules[ours]

    sys.argv = [FILE]
    sys.orig_argv = [FILE]


class Request(NamedTuple):
    """A request to the fork server, which is sent with descriptors for the code, standard input,
    output, error, and results."""

    is_main: bool
    token: bytes
    """Of the frame that reports the isolation."""
    cpu_s: int
    memory_bytes: int
    open_files: int


REQUEST = struct.Struct("=?8sIQI")
"""The encoding of a `Request`."""


def run_program(
    request: Request, descriptors: list[int], isolation: Isolation, server: int
) -> NoReturn:
    """Called in the forked child. server: the process that forked it."""
    token = request.token
    try:
        code = _isolate(request, descriptors, isolation, server)
        write_frame(ANSWERS, token, b"true")
    except BaseException as error:  # whatever it is, the child must not continue without isolation
        write_frame(descriptors[-1], token, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(1)

    if request.is_main:
        os.close(ANSWERS)
        _leave(_run_main(code))

    _leave(serve_calls(code, token, ANSWERS))


def _isolate(request: Request, descriptors: list[int], isolation: Isolation, server: int) -> bytes:
    """Isolate the process; returns the code."""
    die_with(server)
    os.setsid()
    _seed()
    restrict_files(isolation)
    code_at, *standard, answers = descriptors
    code = os.pread(code_at, os.fstat(code_at).st_size, 0)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.dup2(answers, ANSWERS)
    close_from(ANSWERS + 1)
    descriptors[-1] = ANSWERS
    restrict_use(isolation, request.cpu_s, request.memory_bytes, request.open_files)

    return code


def _attempt(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a call of the program's code returns, or what it raises. SystemExit passes."""
    try:
        return call(), None
    except SystemExit:
        raise
    except BaseException as error:  # a program may raise anything
        return None, error


def _run_main(code: bytes) -> int:
    """Returns the exit status."""
    module = _new_module("__main__")
    try:
        _, error = _attempt(lambda: exec(_compiled(code), module.__dict__))
        status = 0 if error is None else _print_traceback(error)
        # it references this frame, which would keep the program's files from being flushed
        del error
    except SystemExit as end:
        status = _status_of(end)

    atexit._run_exitfuncs()
    module.__dict__.clear()  # flushes a file that it opened on descriptor 1
    return status


def serve_calls(code: bytes, token: bytes, answers: int) -> int:
    """Execute the code as a module and answer calls until the other end is closed. Returns the exit
    status."""
    module = _new_module("program")
    try:
        write_frame(
            answers, token, _outcome(*_attempt(lambda: exec(_compiled(code), module.__dict__)))
        )

        while (frame := read_frame(answers)) is not None:
            token, body = frame
            name, args, kwargs = from_text(body)
            found = _outcome(*_attempt(lambda: _find(module, name)(*args, **kwargs)))  # noqa: B023
            write_frame(answers, token, found)
    except SystemExit as end:
        return _status_of(end)

    return 0


def _find(module: ModuleType, name: str) -> Any:
    try:
        return module.__dict__[name]
    except KeyError:
        raise NameError(f"name '{name}' is not defined") from None


def _outcome(result: object, error: BaseException | None) -> bytes:
    """The body of an answer: {"value": ...}, {"raised": [type, text]} or {"refused": reason}."""
    if error is None:
        text, error = _attempt(lambda: _encoded(result))

    if isinstance(error, NotPlain):
        text = json.dumps({"refused": str(error)})
    elif error is not None:
        traceback.clear_frames(error.__traceback__)
        shown, _ = _attempt(lambda: str(error)[:_SHOWN_TEXT])  # `__str__` is the program's code
        # that a test can handle
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        text = json.dumps({"raised": [known.__name__, shown or ""]})

    sys.stdout.flush()
    return text.encode()


def _encoded(value: object) -> str:
    text = f'{{"value": {to_text(value)}}}'
    if len(text) > MAX_BYTES:
        raise NotPlain(f"an answer of {len(text):,} bytes; at most {MAX_BYTES:,}")
    return text


def _new_module(name: str) -> ModuleType:
    """The program's module, replacing the server's of that name."""
    module = ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=FILE)
    sys.modules[name] = module
    gc.enable()
    return module


def _compiled(code: bytes) -> Any:
    """Compile the code, and register its lines for tracebacks."""
    text = code.decode("utf-8", "surrogatepass")
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    return compile(code, FILE, "exec", dont_inherit=True)


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> int:
    """Print the traceback without this module's frames; returns the exit status."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)
        print("MemoryError", file=sys.stderr)
        return EXIT_OUT_OF_MEMORY

    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))

    return 1


def _leave(status: int) -> NoReturn:
    """End the process without the interpreter's own shutdown, which takes longer than most
    programs."""
    try:
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None and not stream.closed:
                stream.flush()
    except (AttributeError, OSError, ValueError):  # the program replaced or closed a stream
        status = status or 120

    os._exit(status)
