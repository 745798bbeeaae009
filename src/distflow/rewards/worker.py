"""The process that runs verifiers: reads one request at a time from its socket and answers it. Imports no torch.

Started by `pool.py` as `python -P -m distflow.rewards.worker FD PARENT_PID MEMORY_BYTES`.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType

from distflow.config.functions import LoadError
from distflow.data import generators
from distflow.observe.jsonlines import JSON
from distflow.rewards.frames import PeerGone, encode, receive_frame, send_frame
from distflow.rewards.functions import call, load_reward, read_score

EXIT_OUT_OF_MEMORY = 86
_PR_SET_PDEATHSIG = 1
_SHOWN_ERROR_CHARACTERS = 1000


def main() -> None:
    """Serve until the run closes its end of the socket."""
    descriptor, parent_pid, memory_bytes = (int(argument) for argument in sys.argv[1:4])
    _die_with(parent_pid)
    _limit_memory(memory_bytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    try:
        serve(channel)
    except PeerGone:
        pass
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)


def serve(channel: socket.socket) -> None:
    """First the functions to load ({name: target}), then requests ({name, arguments}), each with one answer."""
    try:
        targets = _entries(receive_frame(channel), "functions")
        functions = {name: load_reward(str(target)) for name, target in targets.items()}
    except LoadError as error:
        send_frame(channel, encode({"error": str(error)}))
        return
    send_frame(channel, encode({"ready": sorted(functions)}))
    while True:
        request = receive_frame(channel)
        name = str(request["name"])
        send_frame(channel, _judge(name, functions[name], _entries(request, "arguments")))


def _entries(message: Mapping[str, JSON], key: str) -> dict[str, JSON]:
    """Raises ValueError where the message holds no object there."""
    found = message.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"a message without '{key}'")
    return found


def _judge(name: str, function: Callable[..., object], arguments: Mapping[str, object]) -> bytes:
    try:
        returned = _called(name, function, arguments)
        try:
            score, extra = read_score(returned)
        except ValueError as error:  # said of what it returned: no line of ours is to blame
            return encode({"error": str(error)})
        return encode({"score": score, "extra": extra})
    except MemoryError:
        raise  # the heap of this process is no longer to be trusted: a fresh one judges again
    except Exception as error:  # the edge of the process: an error is an answer
        return encode({"error": _describe(error)})


def _called(name: str, function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """What the function draws follows from what it is asked, not from what else this process was asked.

    A call that itself imports numpy or torch, whose generators could not be seeded before, is made once more.
    """
    while True:
        loaded = generators.loaded()
        generators.seed(name, sorted(arguments.items()))
        returned = call(function, arguments)
        if generators.loaded() == loaded:
            return returned


def _describe(error: Exception) -> str:
    """The kind, the message, and the place nearest to where it was raised."""
    place = _innermost(error.__traceback__)
    return f"{type(error).__name__}: {error}"[:_SHOWN_ERROR_CHARACTERS] + f" (at {place})"


def _innermost(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "unknown place"


def _die_with(parent_pid: int) -> None:
    """Be killed when the run dies, even inside C code. Elsewhere than on Linux the closed socket has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _limit_memory(memory_bytes: int) -> None:
    """Data only (heap and private mappings): a limit of the address space would count what is merely reserved."""
    if memory_bytes > 0:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    main()
