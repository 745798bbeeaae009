"""The process that runs reward functions: it reads one request at a time from its socket and
answers it. A request has one response, or several for a function that is async or batched. It does
not import torch itself.

`process.py` starts it below a keeper, with the number of a descriptor as its argument.
"""

import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias, cast

from distflow.data import global_random_states
from distflow.errors import UserError, users_place
from distflow.import_target import innermost, is_async
from distflow.observe.crash_safe_files import JSON
from distflow.processes.channel import Channel, PeerGone, encode
from distflow.rewards.function_calls import (
    call,
    call_batched,
    is_batched,
    split_batch,
    takes_conversation,
    takes_groups,
)
from distflow.rewards.function_loading import load_reward
from distflow.rewards.pool.process import EXIT_OUT_OF_MEMORY
from distflow.rewards.reward_results import due_within, read_score

if TYPE_CHECKING:
    import asyncio

_SHOWN_ERROR_CHARACTERS = 1000
Arguments: TypeAlias = Mapping[str, object]
Answer: TypeAlias = dict[str, JSON]
"""`score` and `extra`, or `error`, or `timeout`."""


def score_all(
    name: str, function: Callable[..., object], asked: Sequence[Arguments], timeout_s: float
) -> list[Answer]:
    """An answer for each call in `asked`. Raises MemoryError, after which this process's heap
    cannot be trusted."""
    try:
        with due_within(timeout_s * len(asked)):
            if is_batched(function):
                call_all = partial(_call_batched, function, asked)
                returned = _called(call_all, name, [sorted(each.items()) for each in asked])
                return _answers(function, returned, len(asked))

            if is_async(function):
                return _event_loop().run(_score_concurrently(name, function, asked, timeout_s))

            return [
                _answer(_called(partial(call, function, each), name, sorted(each.items())))
                for each in asked
            ]
    except Exception as error:  # the user's code may raise anything
        return [_failure(error)] * len(asked)


def describe(error: Exception) -> str:
    """The type, the message, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = "unknown place"
    if frames:
        last = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"

    place = users_place(error) or last
    return f"{type(error).__name__}: {error}"[:_SHOWN_ERROR_CHARACTERS] + f" (at {place})"


def _failure(error: Exception) -> Answer:
    if isinstance(error, MemoryError):
        raise error
    return {"error": describe(error)}


def _call_batched(function: Callable[..., object], asked: Sequence[Arguments]) -> object:
    returned = call_batched(function, asked)
    if inspect.iscoroutine(returned):
        return _event_loop().run(returned)
    return returned


async def _score_concurrently(
    name: str, function: Callable[..., object], asked: Sequence[Arguments], timeout_s: float
) -> list[Answer]:
    """Each call has its own deadline; one that computes without awaiting blocks the others until it
    is killed."""
    import asyncio

    async def score_one(arguments: Arguments) -> Answer:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                with due_within(timeout_s):
                    return _answer(await cast(Awaitable[object], call(function, arguments)))
        except Exception as error:  # the user's code may raise anything
            is_late = deadline.expired() and not isinstance(error, MemoryError)
            if is_late:
                return {"timeout": True}
            return _failure(error)

    global_random_states.seed(name, [sorted(arguments.items()) for arguments in asked])
    return await asyncio.gather(*map(score_one, asked))


@cache
def _event_loop() -> "asyncio.Runner":
    """One event loop for all calls, since connections that an async function keeps open belong to
    it."""
    import asyncio  # a third of a process's start; few functions need it

    return asyncio.Runner()


def _called(function: Callable[[], object], *identity: object) -> object:
    """Call the function with random generators seeded by its arguments, not by earlier calls.

    A call that imports numpy or torch, whose generators could not be seeded before, is repeated.
    """
    while True:
        loaded = global_random_states.loaded()
        global_random_states.seed(*identity)
        returned = function()
        if global_random_states.loaded() == loaded:
            return returned


def _answers(function: Callable[..., object], returned: object, length: int) -> list[Answer]:
    try:
        return [_answer(entry) for entry in split_batch(returned, length)]
    except ValueError as error:  # about the returned value: no line of the function raised it
        code = getattr(inspect.unwrap(innermost(function)), "__code__", None)
        place = ""
        if code:
            place = f" (at {os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        return [{"error": f"{error}{place}"}] * length


def _answer(returned: object) -> Answer:
    try:
        score = read_score(returned)
    except ValueError as error:  # about the returned value: no line raised it
        return {"error": str(error)}
    return {"score": score.value, "extra": score.extra}


def main() -> None:
    """Process requests until the run closes its end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connected = socket.socket(fileno=int(sys.argv[1]))
    connected.set_inheritable(False)

    channel = Channel(connected)
    try:
        serve(channel)
    except PeerGone:
        os._exit(0)  # without waiting for what the functions started
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)


def serve(channel: Channel) -> None:
    """Receive the functions to load ({name: target}), then requests ({name, asked, timeout_s});
    `asked` has the arguments of each call, and the reply an answer for each."""
    try:
        targets = cast(dict[str, str], channel.receive()["functions"])
        functions = {name: load_reward(target) for name, target in targets.items()}
    except UserError as error:
        channel.send(encode({"error": str(error)}))
        return

    groups = [name for name, function in functions.items() if takes_groups(function)]
    batches = [name for name in groups if is_batched(functions[name])]
    conversations = [name for name, function in functions.items() if takes_conversation(function)]
    channel.send(encode({"groups": groups, "batches": batches, "conversations": conversations}))

    while True:
        request = channel.receive()
        name = str(request["name"])
        asked = cast(list[Mapping[str, object]], request["asked"])
        timeout_s = cast(float, request["timeout_s"])

        answers = score_all(name, functions[name], asked, timeout_s)
        try:
            reply = encode({"answers": answers})
        except (TypeError, ValueError) as error:  # more than fits into a message
            reply = encode({"answers": [{"error": describe(error)}] * len(asked)})

        channel.send(reply)
