"""The process that runs verifiers: reads one request at a time from its socket and answers it. Imports no torch
by itself.

Started by `pool.py` as `python -P -m distflow.rewards.worker FD PARENT_PID MEMORY_BYTES`.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import cast

from distflow.config.errors import UserError
from distflow.observe.jsonlines import JSON
from distflow.rewards.frames import Channel, PeerGone, encode
from distflow.rewards.functions import is_batched, load_reward, takes_groups
from distflow.rewards.judging import describe, judge

EXIT_OUT_OF_MEMORY = 86
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the run closes its end of the socket."""
    descriptor, parent_pid, memory_bytes = (int(argument) for argument in sys.argv[1:4])
    _die_with(parent_pid)
    _limit_memory(memory_bytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        serve(channel)
    except PeerGone:
        pass
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)


def serve(channel: Channel) -> None:
    """First the functions to load ({name: target}), then requests ({name, asked, timeout_s}), each with an answer to
    each of the asked, which are the arguments of one."""
    try:
        targets = _entries(channel.receive(), "functions")
        functions = {name: load_reward(str(target)) for name, target in targets.items()}
    except UserError as error:
        channel.send(encode({"error": str(error)}))
        return
    ready = [name for name, function in functions.items() if takes_groups(function)]
    channel.send(encode({"ready": ready, "batched": [name for name in ready if is_batched(functions[name])]}))
    while True:
        request = channel.receive()
        name, asked = str(request["name"]), cast(list[Mapping[str, object]], request["asked"])
        timeout_s = cast(float, request["timeout_s"])
        channel.send(_answers(name, functions[name], asked, timeout_s))


def _entries(message: Mapping[str, JSON], key: str) -> dict[str, JSON]:
    """Raises ValueError where the message holds no object there."""
    found = message.get(key)
    if not isinstance(found, dict):
        raise ValueError(f"a message without '{key}'")
    return found


def _answers(name: str, function: Callable[..., object], asked: list[Mapping[str, object]], timeout_s: float) -> bytes:
    answers = judge(name, function, asked, timeout_s)
    try:
        return encode({"answers": answers})
    except (TypeError, ValueError) as error:  # more than a message may hold
        return encode({"answers": [{"error": describe(error)}] * len(asked)})


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
