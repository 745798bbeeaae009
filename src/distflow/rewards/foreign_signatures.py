"""Reward functions with the parameters of TRL (`completions` and columns, as lists): wrapped so
that they are called like our own.

If the prompt is a chat, a completion is a list with one message, the response; else a text.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from distflow.builtin_names import PROMPT_CHAT, PROMPT_MESSAGES
from distflow.import_target import innermost, required_parameters

DOES_NOT_APPLY = "not_applicable"
"""Key of the result if a TRL function returned None for a response: it does not apply and adds
0."""
_TEXTS = (
    "a completion is a string here, like the prompt; with data.prompt_format=chat both are messages"
)
_MESSAGES = "a completion is a list of messages here, because the prompt is a chat"
ABSENT = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""Parts of TRL's trainer."""


def is_foreign(function: Callable[..., object]) -> bool:
    """Whether it takes the completions of TRL."""
    return "completions" in inspect.signature(function).parameters


def find_absent(function: Callable[..., object]) -> str:
    """The parameter for which nothing can be passed; empty if there is none."""
    absent = [name for name in required_parameters(function) if name in ABSENT]
    if not absent:
        return ""

    return (
        f"takes '{absent[0]}', which only exists in TRL: add a default, read the responses from "
        "'completions', and the row's columns by name"
    )


def adapted(
    function: Callable[..., object], options: Mapping[str, object], answer_key: str
) -> Callable[..., object]:
    """A function with our parameters that calls `function`. answer_key: the column of the ground
    truth, which is also passed by this name."""

    def ours(
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[object],
        extra_infos: Sequence[Mapping[str, object] | None],
        prompts: Sequence[str] = (),
    ) -> object:
        texts = prompts or [""] * len(solution_strs)
        rows = [
            _values(answer_key, *each)
            for each in zip(solution_strs, ground_truths, extra_infos, texts, strict=True)
        ]

        columns = {name: [row.get(name) for row in rows] for name in rows[0]}
        try:
            returned = function(**{**_chosen(function, columns), **options})
        except (AttributeError, TypeError) as error:  # usually it expects the other form
            is_text = isinstance(rows[0]["completions"], str)
            error.args = (f"{error} ({_TEXTS if is_text else _MESSAGES})",)
            raise

        if inspect.isawaitable(returned):
            return _when_there(returned)
        return _without_none(returned)

    signature = inspect.signature(ours)
    functools.update_wrapper(ours, innermost(function))

    # else `inspect` takes that of the wrapped function
    setattr(ours, "__signature__", signature)  # noqa: B010
    return ours


def _values(
    answer_key: str, text: str, truth: object, extra_info: Mapping[str, object] | None, prompt: str
) -> dict[str, Any]:
    """The possible arguments for one response, by parameter names: the row's columns, and values
    under other names."""
    columns = dict(extra_info or {})
    columns.pop(PROMPT_MESSAGES, None)  # present even for text prompts, for built-in functions
    chat = columns.pop(PROMPT_CHAT, None)
    return {
        "answer": truth,
        "ground_truth": truth,
        **columns,
        answer_key: truth,
        "prompts": prompt if chat is None else chat,
        "completions": text if chat is None else [{"role": "assistant", "content": text}],
    }


def _chosen(function: Callable[..., object], offered: Mapping[str, object]) -> dict[str, object]:
    """The arguments that it takes. Raises ValueError for a missing one."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        chosen = dict(offered)
    else:
        names = {parameter.name for parameter in parameters}
        chosen = {name: value for name, value in offered.items() if name in names}

    for name in required_parameters(function):
        if name not in chosen:
            raise ValueError(
                f"it takes '{name}', but there is no such column; the columns are "
                f"{', '.join(offered)}"
            )

    return chosen


async def _when_there(returned: Awaitable[object]) -> object:
    return _without_none(await returned)


def _without_none(returned: object) -> object:
    if not isinstance(returned, list | tuple):
        return returned
    return [{"score": 0.0, DOES_NOT_APPLY: True} if score is None else score for score in returned]
