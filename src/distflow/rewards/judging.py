"""Calls of a reward function in its verifier process: one answer, several that wait together, or a batch of them."""

import inspect
import os
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, cast

from distflow.data import generators
from distflow.graph.functions import is_async
from distflow.observe.jsonlines import JSON
from distflow.rewards.deadline import due_within
from distflow.rewards.functions import call, call_batched, is_batched, read_score, split_batch

if TYPE_CHECKING:
    import asyncio

_SHOWN_ERROR_CHARACTERS = 1000
Arguments: TypeAlias = Mapping[str, object]
Answer: TypeAlias = dict[str, JSON]
"""`score` and `extra`, or `error`, or `timeout`."""


def judge(name: str, function: Callable[..., object], asked: Sequence[Arguments], timeout_s: float) -> list[Answer]:
    """An answer to each of the asked. Raises MemoryError: the heap of this process is then no longer to be trusted."""
    with due_within(timeout_s * len(asked)):
        return _judge(name, function, asked, timeout_s)


def _judge(name: str, function: Callable[..., object], asked: Sequence[Arguments], timeout_s: float) -> list[Answer]:
    try:
        if is_batched(function):
            return _judge_together(name, function, asked)
        if is_async(function):
            return _loop().run(_judge_at_once(name, function, asked, timeout_s))
        return [_answer(_called(partial(call, function, each), name, sorted(each.items()))) for each in asked]
    except MemoryError:
        raise
    except Exception as error:  # the edge of the process: an error is an answer
        return [{"error": describe(error)}] * len(asked)


def describe(error: Exception) -> str:
    """The kind, the message, and the place nearest to where it was raised."""
    place = _innermost(error.__traceback__)
    return f"{type(error).__name__}: {error}"[:_SHOWN_ERROR_CHARACTERS] + f" (at {place})"


def _judge_together(name: str, function: Callable[..., object], asked: Sequence[Arguments]) -> list[Answer]:
    returned = _called(partial(_batched, function, asked), name, [sorted(arguments.items()) for arguments in asked])
    return [_answer(entry) for entry in split_batch(returned, len(asked))]


def _batched(function: Callable[..., object], asked: Sequence[Arguments]) -> object:
    returned = call_batched(function, asked)
    return _loop().run(returned) if inspect.iscoroutine(returned) else returned


async def _judge_at_once(
    name: str, function: Callable[..., object], asked: Sequence[Arguments], timeout_s: float
) -> list[Answer]:
    """Each with a deadline of its own; one that computes without awaiting holds up the others, until it is killed."""
    import asyncio

    async def judge_one(arguments: Arguments) -> Answer:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                with due_within(timeout_s):
                    return _answer(await cast(Awaitable[object], call(function, arguments)))
        except MemoryError:
            raise
        except Exception as error:  # as above
            return {"timeout": True} if deadline.expired() else {"error": describe(error)}

    generators.seed(name, [sorted(arguments.items()) for arguments in asked])
    return list(await asyncio.gather(*(judge_one(arguments) for arguments in asked)))


@cache
def _loop() -> "asyncio.Runner":
    """One for all calls: what an async function keeps open belongs to it."""
    import asyncio  # most functions are plain, and their processes start sooner without it

    return asyncio.Runner()


def _called(function: Callable[[], object], *identity: object) -> object:
    """What the function draws follows from what it is asked, not from what else this process was asked.

    A call that itself imports numpy or torch, whose generators could not be seeded before, is made once more.
    """
    while True:
        loaded = generators.loaded()
        generators.seed(*identity)
        returned = function()
        if generators.loaded() == loaded:
            return returned


def _answer(returned: object) -> Answer:
    try:
        score, extra = read_score(returned)
    except ValueError as error:  # said of what it returned: no line of ours is to blame
        return {"error": str(error)}
    return {"score": score, "extra": extra}


def _innermost(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "unknown place"
