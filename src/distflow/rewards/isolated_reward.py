"""The probe: a reward function called in a process of its own, which also returns the texts in the function's source.

Each start of a run loads it in a new process, so it imports little.
"""

import inspect
import socket
from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

from distflow.import_target import innermost
from distflow.rewards.load_functions import PROMPT, call_arguments, load_reward, texts_in, with_options
from distflow.rewards.pool.worker import score_all
from distflow.rewards.score import left_s

TEXTS = "texts of its source"
NO_NETWORK = "a reward function is tried without a network"


def probe_target(target: str, network: bool) -> str:
    """Of a function that returns what `target` does, and the texts in its source. network: whether it may use one."""
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
    function, texts = _load(target, network)
    asked = {PROMPT: prompt, **call_arguments(data_source, solution_str, ground_truth, extra_info or {})}
    (answer,) = score_all(target, function, [asked], left_s())
    if "score" not in answer:
        raise ValueError(answer.get("error", "it timed out"))
    return {TEXTS: texts, **cast(dict[str, object], answer["extra"]), "score": answer["score"]}


@cache
def _load(target: str, network: bool) -> tuple[Callable[..., object], list[str]]:
    """The function, and the short texts in it and the helpers of its module."""

    def refuse(*_: object) -> None:
        raise ConnectionError(NO_NETWORK)

    for name in () if network else ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, refuse)
    function = load_reward(target)
    plain = inspect.unwrap(innermost(function))
    texts = dict.fromkeys(texts_in(plain, str(getattr(plain, "__module__", "")), set()))
    return function, [text for text in texts if 0 < len(text) <= 80][:40]
