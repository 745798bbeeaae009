"""Which function a reward's name means, how it is called, how its answer is read. Imports none by itself."""

import inspect
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from distflow.config.errors import UserError, hint
from distflow.config.functions import LoadError, load_function, split_name
from distflow.config.names import CUSTOM_REWARD, REWARDS
from distflow.graph.functions import is_async
from distflow.observe.jsonlines import JSON
from distflow.rewards.correctness import ACC
from distflow.rewards.given import SUFFIX, read_function
from distflow.rewards.remarks import bounded

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
PROMPT, PROMPTS = "prompt", "prompts"
"""The prompt's text, for an async function that names it; those of all answers, for a batched one."""
FAILS, FAILS_TARGET = "(a probe that fails)", "distflow.rewards.probes:fail"
"""A function of every pool that must give no verdict, for the auditor to ask."""

_OPTIONS = "?"
BATCHED = {"data_sources": "data_source", "solution_strs": "solution_str"} | {
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
"""What a batched reward takes, as verl's do: lists with an entry for each answer."""

Parts = Sequence[tuple[str, float] | tuple[str, float, Mapping[str, object]]]
"""(name, weight), and the part's options where it has some."""
Functions = Mapping[str, Parts]
"""The parts by domain."""


def with_options(target: str, options: Mapping[str, object]) -> str:
    """A target whose function is called with these besides; `load_reward` reads it."""
    return f"{target}{_OPTIONS}{json.dumps(options, sort_keys=True)}" if options else target


def find_targets(parts: Parts, custom: tuple[str, str] | None) -> dict[str, str]:
    """What a pool loads for them, by name. custom: path and name of the user's function, for the name "custom".

    Raises UserError for a name that means no function.
    """
    targets = {name: with_options(target_of(name, custom), given[0] if given else {}) for name, _, *given in parts}
    return {**targets, FAILS: FAILS_TARGET}


def custom_target(path: str, name: str) -> str:
    """`custom_reward_function.path` and `.name` as one "module:function" or "file.py:function", the file absolute."""
    if path.endswith((".py", SUFFIX)):
        return f"{Path(path).expanduser().resolve()}:{name}"
    return f"{path}:{name}"


def load_reward(target: str) -> Callable[..., object]:
    """The function that "module:function" or "/path/file.py:function" names, or that a run was given from Python, with
    the options that a "?" and a JSON object behind it give.

    What a built-in needs besides is loaded too. Raises LoadError where there is none, or it takes other parameters than
    a reward does, or other options; UserError where what it needs cannot be loaded.
    """
    target, _, options = target.partition(_OPTIONS)
    path = split_name(target)[0]
    function = read_function(Path(path)) if path.endswith(SUFFIX) else load_function(target)
    given = json.loads(options) if options else {}
    fault = find_fault(function) or _fault_of_options(function, given)
    if fault:
        raise LoadError(f"'{target}' {fault}")
    for entry in REWARDS.values():
        if entry.prepare and entry.target == target:
            load_function(entry.prepare)(**given)
    return partial(function, **given) if given else function


def _fault_of_options(function: Callable[..., object], given: Mapping[str, object]) -> str:
    """What of the options of a part is none of the function's: a parameter with a default, of the default's type."""
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty and name not in (*PARAMETERS, *BATCHED, PROMPT, PROMPTS)
    }
    for name, value in given.items():
        if name not in known:
            return f"takes no option '{name}'{hint(name, known)}; it takes {', '.join(known) or 'none'}"
        wanted = type(known[name])
        if known[name] is not None and type(value) is not wanted and (wanted, type(value)) != (float, int):
            return f"takes for '{name}' a value like {known[name]!r}, not {value!r}"
    return ""


def find_fault(function: Callable[..., object]) -> str:
    """What of its parameters no reward has; empty where they are those of one."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return "does not say what it takes: wrap it into a function of Python"
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    wanted = tuple(BATCHED) if is_batched(function) else PARAMETERS
    if all(name in wanted for name in required) and _accepted(function, wanted):
        return ""
    return (
        f"takes ({', '.join(required)}): a reward takes some of ({', '.join(PARAMETERS)}), or, for all answers to a "
        f"prompt at once, of ({', '.join(BATCHED)}); one over columns of a batch is a node of a custom pipeline"
    )


def is_batched(function: Callable[..., object]) -> bool:
    """Whether it takes lists, an entry for each answer to a prompt."""
    return any(name in BATCHED for name in inspect.signature(function).parameters)


def takes_groups(function: Callable[..., object]) -> bool:
    """Whether it is handed all answers to a prompt at a time: batched, or async, of which many wait together."""
    return is_batched(function) or is_async(function)


def call(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Call it by keyword with those of `PARAMETERS` that it takes, and with the prompt where it names that and there is
    one."""
    given = {name: arguments[name] for name in _accepted(function, PARAMETERS)}
    if PROMPT in arguments and PROMPT in inspect.signature(function).parameters:
        given[PROMPT] = arguments[PROMPT]
    return function(**given)


def call_batched(function: Callable[..., object], asked: Sequence[Mapping[str, object]]) -> object:
    """Call it by keyword with lists of those of `PARAMETERS` whose plural it takes, and with the prompts as `call`."""
    lists = {name: [arguments[BATCHED[name]] for arguments in asked] for name in _accepted(function, tuple(BATCHED))}
    if PROMPTS in inspect.signature(function).parameters and all(PROMPT in arguments for arguments in asked):
        lists[PROMPTS] = [arguments[PROMPT] for arguments in asked]
    return function(**lists)


def split_batch(returned: object, length: int) -> list[object]:
    """The entries of what a batched reward returned. Raises ValueError unless it is a sequence of that length."""
    if callable(tolist := getattr(returned, "tolist", None)):
        returned = tolist()  # tensors and arrays
    if not isinstance(returned, list | tuple) or len(returned) != length:
        what = f"{len(returned)} scores" if isinstance(returned, list | tuple) else f"{returned!r:.80}"
        raise ValueError(f"it returned {what} for {length} answers: a batched reward returns a list of as many")
    return list(returned)


def read_score(returned: object) -> tuple[float, dict[str, JSON]]:
    """The score, and within bounds what else a dictionary held: nothing but `acc` is computed from it. Raises
    ValueError for a score or an `acc` that is no finite number."""
    extra: dict[str, JSON] = {}
    if isinstance(returned, dict):
        if "score" not in returned:
            raise ValueError(
                f"it returned a dictionary without 'score' (keys: {', '.join(map(str, returned)) or 'none'})"
            )
        extra = bounded({key: value for key, value in returned.items() if key not in ("score", ACC)})
        if returned.get(ACC) is not None:
            extra[ACC] = _number(returned[ACC], f" as '{ACC}'")
        returned = returned["score"]
    return _number(returned), extra


def _number(value: object, where: str = "") -> float:
    """Of a number, a truth value, or a scalar of numpy or torch. Raises ValueError for anything else."""
    if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
        value = item()  # those with more than one element raise here
    if not isinstance(value, numbers.Real):
        raise ValueError(f"it returned {value!r:.80}{where}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"it returned{where} a number that is too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}{where}, which is no finite number")
    return number


def _accepted(function: Callable[..., object], names: tuple[str, ...]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return names
    return tuple(name for name in names if name in parameters)


def target_of(name: str, custom: tuple[str, str] | None) -> str:
    if name == CUSTOM_REWARD:
        if custom is None or not custom[0]:
            raise UserError("reward.functions names 'custom': set custom_reward_function.path to its file or module")
        return custom_target(*custom)
    if name in REWARDS:
        return REWARDS[name].target
    if ":" in name:
        return custom_target(*split_name(name))
    raise UserError(f"reward.functions names '{name}', which is no reward{hint(name, REWARDS)}")
