"""Which arguments a reward function takes, and how it is called."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

from distflow.import_target import (
    is_async,
)

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
PROMPT = "prompt"
PROMPTS = "prompts"
"""Parameters for the prompt's text, and for the prompts of all responses, of a batched function."""
CONVERSATION = "conversation"
CONVERSATIONS = "conversations"
"""Parameters for the turns of an episode so far, and for those of each response, of a batched
function."""
_PLURALS = {PROMPT: PROMPTS, CONVERSATION: CONVERSATIONS}
BATCHED = {f"{name}s": name for name in PARAMETERS}
"""Parameters of a batched reward function, as in verl: lists with an entry for each response."""


def is_batched(function: Callable[..., object]) -> bool:
    """Whether it takes lists, with an entry for each response to a prompt."""
    return any(name in BATCHED for name in _parameters(function))


def takes_groups(function: Callable[..., object]) -> bool:
    """Whether it gets all responses to a prompt at once: it is batched, or async, to wait for them
    together."""
    return is_batched(function) or is_async(function)


def takes_conversation(function: Callable[..., object]) -> bool:
    """Whether it sees the whole episode, not only the response."""
    return not {CONVERSATION, CONVERSATIONS}.isdisjoint(inspect.signature(function).parameters)


def call_arguments(
    domain: str, response: str, ground_truth: object, extra_info: Mapping[str, object]
) -> dict[str, object]:
    """The arguments of a call, by the names in `PARAMETERS`."""
    return dict(zip(PARAMETERS, (domain, response, ground_truth, extra_info), strict=True))


def call(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Call it by keyword with those of `PARAMETERS` that it takes, and with the prompt and the
    conversation if it takes ones that exist."""
    accepted = {name: arguments[name] for name in _accepted(function, PARAMETERS)}
    taken = _parameters(function)
    return function(
        **accepted,
        **{name: arguments[name] for name in _PLURALS if name in arguments and name in taken},
    )


def call_batched(function: Callable[..., object], asked: Sequence[Mapping[str, object]]) -> object:
    """Call it by keyword with lists for those of `PARAMETERS` whose plural it takes, and of others
    as `call`."""
    lists = {
        name: [arguments[BATCHED[name]] for arguments in asked]
        for name in _accepted(function, tuple(BATCHED))
    }
    for name, plural in _PLURALS.items():
        if plural in _parameters(function) and all(name in arguments for arguments in asked):
            lists[plural] = [arguments[name] for arguments in asked]

    return function(**lists)


def split_batch(returned: object, length: int) -> list[object]:
    """The entries that a batched reward function returned. Raises ValueError unless it is a
    sequence of that length."""
    if callable(tolist := getattr(returned, "tolist", None)):
        returned = tolist()  # tensors and arrays

    if not isinstance(returned, list | tuple) or len(returned) != length:
        if isinstance(returned, list | tuple):
            what = f"a list of {len(returned)}"
        else:
            what = f"{returned!r:.80}"

        raise ValueError(
            f"it returned {what} for {length} responses: a batched reward function returns one "
            "score per response"
        )

    return list(returned)


def _accepted(function: Callable[..., object], names: tuple[str, ...]) -> tuple[str, ...]:
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return names
    return tuple(name for name in names if name in parameters)


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Kept, because they are looked up for each call, and `inspect` takes as long as a short reward
    function."""
    try:
        return _kept_parameters(function)
    except TypeError:  # an object without a hash
        return inspect.signature(function).parameters


@functools.cache
def _kept_parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
