"""The forked child: it raises the walls, says so, and runs the program."""

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
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from distflow.sandbox.inside.isolation import Walls, die_with, restrict_calls, restrict_files, restrict_use
from distflow.sandbox.inside.libc import close_from
from distflow.sandbox.inside.values import MAX_BYTES, NotPlain, from_text, read_frame, to_text, write_frame

EXIT_OUT_OF_MEMORY = 86
ANSWERS = 3
"""The private descriptor of a session."""
FILE = "program.py"
# What `random.seed` comes to in C. The server's own state would be every program's.
_seed = super(random.Random, random._inst).seed
_SHOWN_TEXT = 2000


def prepare() -> None:
    """What every program finds, done once, in the server: streams of its own where 0, 1 and 2 will be, no names of ours
    to import, `exit`, which is there only where `site` was run."""
    os.dup2(os.memfd_create(""), 0)
    for number in (1, 2):
        os.dup2(os.pipe()[1], number)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = (  # type: ignore[misc]
        open(0, encoding="utf-8", errors="surrogateescape", closefd=False),  # noqa: SIM115  as long as the process
        open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False),  # noqa: SIM115
        open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False),  # noqa: SIM115
    )
    os.environ.clear()  # the shell's and the interpreter's own
    site.setquit()
    for ours in [name for name in sys.modules if name.partition(".")[0] in ("__main__", "distflow")]:
        del sys.modules[ours]
    sys.argv, sys.orig_argv = [FILE], [FILE]


class Request(NamedTuple):
    """What is asked of the fork server. token: of the frame which says that the walls are up.

    Descriptors follow: of the code, standard input, output, error, and of the answers.
    """

    is_main: bool
    token: bytes
    cpu_s: int
    memory_bytes: int
    open_files: int


REQUEST = struct.Struct("=?8sIQI")
"""A `Request`, as it is sent."""


def run_program(request: Request, descriptors: list[int], walls: Walls, server: int) -> NoReturn:
    """In the forked child. `server` is the process that forked it."""
    token = request.token
    try:
        code = _shut_in(request, descriptors, walls, server)
        write_frame(ANSWERS, token, b"true")
    except BaseException as error:
        write_frame(descriptors[-1], token, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(1)
    if request.is_main:
        os.close(ANSWERS)
        _leave(_run_main(code))
    _leave(serve_calls(code, token, ANSWERS))


def _shut_in(request: Request, descriptors: list[int], walls: Walls, server: int) -> bytes:
    """Returns the code."""
    die_with(server)
    os.setsid()
    _seed()
    restrict_files(walls)
    code_at, *standard, answers = descriptors
    code = os.pread(code_at, os.fstat(code_at).st_size, 0)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.dup2(answers, ANSWERS)
    close_from(ANSWERS + 1)
    descriptors[-1] = ANSWERS
    restrict_use(request.cpu_s, request.memory_bytes, request.open_files)
    restrict_calls(walls)
    return code


def _run_main(code: bytes) -> int:
    """Exit status."""
    module = _new_module("__main__")
    try:
        exec(_compiled(code), module.__dict__)
        status = 0
    except SystemExit as error:
        status = _status_of(error)
    except BaseException as error:
        status = _shown(error)
    atexit._run_exitfuncs()
    module.__dict__.clear()  # a file that it opened on descriptor 1 writes what it holds
    return status


def serve_calls(code: bytes, token: bytes, answers: int) -> int:
    """Execute the code as a module and answer calls until the other end is closed; exit status."""
    module = _new_module("program")
    try:
        write_frame(answers, token, _outcome(lambda: exec(_compiled(code), module.__dict__)))
        while (frame := read_frame(answers)) is not None:
            token, body = frame
            name, args, kwargs = from_text(body)
            write_frame(answers, token, _outcome(lambda: _find(module, name)(*args, **kwargs)))  # noqa: B023  called here
    except SystemExit as error:
        return _status_of(error)
    return 0


def _find(module: ModuleType, name: str) -> Any:
    try:
        return module.__dict__[name]
    except KeyError:
        raise NameError(f"name '{name}' is not defined") from None


def _outcome(call: Any) -> bytes:
    """The body of an answer: {"value": ...}, {"raised": [type, text]} or {"refused": why}."""
    try:
        value = call()
        text = f'{{"value": {to_text(value)}}}'
        if len(text) > MAX_BYTES:
            raise NotPlain(f"an answer of {len(text):,} bytes; at most {MAX_BYTES:,}")
    except SystemExit:
        raise
    except NotPlain as error:
        text = json.dumps({"refused": str(error)})
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        text = json.dumps({"raised": [type(error).__name__, _text_of(error)]})
    sys.stdout.flush()
    return text.encode()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:_SHOWN_TEXT]
    except Exception:
        return ""


def _new_module(name: str) -> ModuleType:
    """The program's own, where the server's was."""
    module = ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=FILE)
    sys.modules[name] = module
    gc.enable()
    return module


def _compiled(code: bytes) -> Any:
    """Tracebacks show its lines."""
    text = code.decode("utf-8", "surrogatepass")
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    return compile(code, FILE, "exec", dont_inherit=True)


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _shown(error: BaseException) -> int:
    """Print the traceback, without our part of it; exit status."""
    shown = error.__traceback__.tb_next if error.__traceback__ else None
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)
        print("MemoryError", file=sys.stderr)
        return EXIT_OUT_OF_MEMORY
    traceback.print_exception(error.with_traceback(shown))
    return 1


def _leave(status: int) -> NoReturn:
    """Without the interpreter's own end, which takes longer than most programs."""
    try:
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None and not stream.closed:
                stream.flush()
    except (AttributeError, OSError, ValueError):  # a stream of the program's own, or what it stands on is closed
        status = status or 120
    os._exit(status)
