"""Reward functions with the parameters of TRL (`completions` and columns, as lists) and of
verifiers' rubrics, which prime-rl has too (`completion`, `answer`, ...): wrapped so that they are
called like our own.

If the prompt is a chat, a completion is a list with one message, the response; else a text.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from distflow.builtin_names import PROMPT_CHAT, PROMPT_MESSAGES
from distflow.import_target import innermost, is_async, required_parameters

DOES_NOT_APPLY = "not_applicable"
"""Key of the result if a TRL function returned None for a response: it does not apply and adds
0."""
_TEXTS = (
    "a completion is a string here, like the prompt; with data.prompt_format=chat both are messages"
)
_MESSAGES = "a completion is a list of messages here, because the prompt is a chat"
_SINGLE = ("prompt", "completion")
ABSENT = (
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "state",
    "states",
    "parser",
    "judge",
)
"""Parts of TRL's trainer and of verifiers' environments and episodes."""


def is_foreign(function: Callable[..., object]) -> bool:
    """Whether it takes the completion(s) of TRL or verifiers."""
    return not {"completion", "completions"}.isdisjoint(inspect.signature(function).parameters)


def find_absent(function: Callable[..., object]) -> str:
    """The parameter for which nothing can be passed; empty if there is none."""
    absent = [name for name in required_parameters(function) if name in ABSENT]
    if not absent:
        return ""
    return (
        f"takes '{absent[0]}', which only exists in TRL or verifiers: add a default, read the "
        "response from "
        "'completion' or 'completions', and the row's columns by name"
    )


def adapted(
    function: Callable[..., object], options: Mapping[str, object], answer_key: str
) -> Callable[..., object]:
    """A function with our parameters that calls `function`. answer_key: the column of the ground
    truth, which is also passed by this name."""
    is_group = "completions" in inspect.signature(function).parameters

    def ask(arguments: Mapping[str, object]) -> object:
        chosen = {**_chosen(function, arguments), **options}
        try:
            return function(**chosen)
        except (AttributeError, TypeError) as error:  # usually it expects the other form
            of_each: Any = arguments["completions" if is_group else "completion"]
            is_text = isinstance(of_each[0] if is_group else of_each, str)
            error.args = (f"{error} ({_TEXTS if is_text else _MESSAGES})",)
            raise

    def for_one(*, prompt: str = "", **asked: Any) -> object:
        return ask(_values(asked, prompt, answer_key))

    async def for_one_async(*, prompt: str = "", **asked: Any) -> object:
        return await cast(Awaitable[object], for_one(prompt=prompt, **asked))

    def for_group(
        *, solution_strs: Sequence[str], prompts: Sequence[str] = (), **asked: Any
    ) -> object:
        each = {
            "solution_str": solution_strs,
            **{name.removesuffix("s"): values for name, values in asked.items()},
        }
        rows = [dict(zip(each, values, strict=True)) for values in zip(*each.values(), strict=True)]
        texts = prompts or [""] * len(rows)
        of_rows = [_values(row, text, answer_key) for row, text in zip(rows, texts, strict=True)]
        columns = {name: [row.get(name) for row in of_rows] for name in of_rows[0]}
        returned = ask(
            {f"{name}s" if name in _SINGLE else name: values for name, values in columns.items()}
        )
        return _when_there(returned) if inspect.isawaitable(returned) else _without_none(returned)

    ours: Callable[..., object] = for_one_async if is_async(function) else for_one
    ours = for_group if is_group else ours
    signature = inspect.signature(ours)
    functools.update_wrapper(ours, innermost(function))
    # else `inspect` takes that of the wrapped function
    setattr(ours, "__signature__", signature)  # noqa: B010
    return ours


def _values(asked: Mapping[str, Any], prompt: str, answer_key: str) -> dict[str, object]:
    """The possible arguments for one response, by parameter names: the row's columns, and values
    under other names."""
    columns = dict(asked["extra_info"] or {})
    truth = asked["ground_truth"]
    columns.pop(PROMPT_MESSAGES, None)  # present even for text prompts, for built-in functions
    chat = columns.pop(PROMPT_CHAT, None)
    text = asked["solution_str"]
    return {
        **{"answer": truth, "ground_truth": truth, "info": {}, "task": asked["data_source"]},
        **columns,
        answer_key: truth,
        "prompt": prompt if chat is None else chat,
        "completion": text if chat is None else [{"role": "assistant", "content": text}],
    }


def _chosen(function: Callable[..., object], offered: Mapping[str, object]) -> dict[str, object]:
    """The arguments that it takes; a parameter may be the plural of a column. Raises ValueError for
    a missing one."""
    parameters = inspect.signature(function).parameters.values()
    chosen = (
        dict(offered)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        else {}
    )
    for parameter in parameters:
        name = parameter.name
        is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        column = (
            name
            if name in offered or parameter.default is not parameter.empty
            else name.removesuffix("s")
        )
        if column in offered and not is_variadic:
            chosen[name] = offered[column]
        elif parameter.default is parameter.empty and not is_variadic:
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
