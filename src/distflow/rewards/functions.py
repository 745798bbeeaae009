"""Which function a reward's name means, how it is called, how its answer is read. Imports none by itself."""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distflow.config.errors import UserError, hint
from distflow.config.functions import LoadError, load_function, split_name
from distflow.config.names import CUSTOM_REWARD, REWARDS
from distflow.observe.jsonlines import JSON
from distflow.rewards.correctness import ACC

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
FAILS = "(a probe that fails)"
"""A function of every pool that must give no verdict, for the auditor to ask."""

Functions = Mapping[str, Sequence[tuple[str, float]]]
"""(name, weight) of its parts by domain."""


def find_targets(functions: Functions, custom: tuple[str, str] | None) -> dict[str, str]:
    """What a pool loads for them, by name. custom: path and name of the user's function, for the name "custom".

    Raises UserError for a name that means no function.
    """
    names = sorted({name for parts in functions.values() for name, _ in parts})
    return {**{name: _target(name, custom) for name in names}, FAILS: "distflow.rewards.probes:fail"}


def custom_target(path: str, name: str) -> str:
    """`custom_reward_function.path` and `.name` as one "module:function" or "file.py:function", the file absolute."""
    return f"{Path(path).expanduser().resolve()}:{name}" if path.endswith(".py") else f"{path}:{name}"


def load_reward(target: str) -> Callable[..., object]:
    """The function that "module:function" or "/path/file.py:function" names.

    Raises LoadError where there is none, or it takes other parameters than `compute_score` does, or it is async.
    """
    function = load_function(target)
    _check_parameters(function, target)
    return function


def call(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Call it by keyword with those of `PARAMETERS` that it takes."""
    return function(**{name: arguments[name] for name in _accepted(function)})


def read_score(returned: object) -> tuple[float, dict[str, JSON]]:
    """The score and what else a dictionary held. Raises ValueError for a score or an `acc` that is no finite number."""
    extra: dict[str, JSON] = {}
    if isinstance(returned, dict):
        if "score" not in returned:
            raise ValueError(
                f"it returned a dictionary without 'score' (keys: {', '.join(map(str, returned)) or 'none'})"
            )
        extra = {str(key): _plain(value) for key, value in returned.items() if key != "score"}
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
    if not math.isfinite(value):
        raise ValueError(f"it returned {float(value)}{where}, which is no finite number")
    return float(value)


def _check_parameters(function: Callable[..., object], target: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise LoadError(f"'{target}' is async: a reward runs in a process of its own and may block")
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    unknown = [name for name in required if name not in PARAMETERS]
    if unknown or not _accepted(function):
        raise LoadError(
            f"'{target}' takes ({', '.join(required)}): a reward takes some of ({', '.join(PARAMETERS)}); "
            "one over a whole batch is a node of a custom pipeline"
        )


def _accepted(function: Callable[..., object]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return PARAMETERS
    return tuple(name for name in PARAMETERS if name in parameters)


def _plain(value: object) -> JSON:
    """What JSON can hold of a function's remarks: they are shown with the sample, nothing is computed from them."""
    if isinstance(value, str | bool | int | float | type(None)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(entry) for entry in value]
    return repr(value)[:1000]


def _target(name: str, custom: tuple[str, str] | None) -> str:
    if name == CUSTOM_REWARD:
        if custom is None or not custom[0]:
            raise UserError("reward.functions names 'custom': set custom_reward_function.path to its file or module")
        return custom_target(*custom)
    if name in REWARDS:
        return REWARDS[name].target
    if ":" in name:
        return custom_target(*split_name(name))
    raise UserError(f"reward.functions names '{name}', which is no reward{hint(name, REWARDS)}")
