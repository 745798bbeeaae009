"""Reward functions that test workers and other reward functions: one fails in the way that it is
told to or returns a number from its arguments, one calls another function and also returns the
texts in its source."""

import hashlib
import inspect
import json
import math
import os
import re
import socket
from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

from distflow.import_target import innermost
from distflow.rewards.function_calls import PROMPT, call_arguments
from distflow.rewards.function_loading import load_reward, texts_in, with_options
from distflow.rewards.reward_results import left_s

ECHO = "(echo)"
TEXTS = "texts of its source"
NO_NETWORK = "a reward function is tried without a network"


def probe_target(target: str, network: bool) -> str:
    """Target of a function that returns `target`'s result and the texts in its source. network:
    whether it may use one."""
    return with_options(f"{__name__}:probe", {"target": target, "network": network})


def probe(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
    prompt: str = "",
    target: str = "",
    network: bool = True,
) -> dict[str, object]:
    """See `probe_target`."""
    from distflow.rewards.pool.worker import score_all  # no other probe needs it

    function, texts = _load(target, network)
    asked = {
        PROMPT: prompt,
        **call_arguments(data_source, solution_str, ground_truth, extra_info or {}),
    }
    (answer,) = score_all(target, function, [asked], left_s())
    if "score" not in answer:
        raise ValueError(answer.get("error", "it timed out"))
    return {TEXTS: texts, **cast(dict[str, object], answer["extra"]), "score": answer["score"]}


@cache
def _load(target: str, network: bool) -> tuple[Callable[..., object], list[str]]:
    """The function, and the short texts in it and in helpers of its module."""

    def refuse(*_: object) -> None:
        raise ConnectionError(NO_NETWORK)

    for name in () if network else ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, refuse)
    function = load_reward(target)
    plain = inspect.unwrap(innermost(function))
    texts = dict.fromkeys(texts_in(plain, str(getattr(plain, "__module__", "")), set()))
    return function, [text for text in texts if 0 < len(text) <= 80][:40]


def fail(solution_str: str, ground_truth: object = None, extra_info: object = None) -> object:
    """Fail in the way that the response names; by a ValueError if it names none. With `ECHO` in it,
    return `echo`."""
    match solution_str:
        case text if ECHO in text:
            return echo(text, ground_truth, extra_info)
        case "hang":  # practically forever, in the C code of `re`, which holds the interpreter lock
            return re.match(r"(a|aa)+$", "a" * 200 + "b")
        case "exit":  # as a crash does
            os._exit(0)
        case "KeyError":
            raise KeyError("as it should")
        case "nan":
            return math.nan
        case "None":
            return None
        case "text":
            return "1.0"
    raise ValueError("as it should")


def echo(solution_str: str, ground_truth: object, extra_info: object) -> float:
    """A number that changes with any change of the arguments."""
    text = json.dumps([solution_str, ground_truth, extra_info], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") / 2**48
