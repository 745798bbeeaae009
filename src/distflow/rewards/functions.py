"""Reward functions given from Python: written into the run's folder, for verifiers are processes of their own.

A function of an importable module is written as its name; one of a notebook, a script or another function with its code
and with what it refers to there. Such a file is a program like a `.py` file: read only where a config names it.

What a verifier says of a sample besides its score, within bounds: it is kept with the sample, for people.

Which function a reward's name means, how it is called, how its answer is read. Imports none by itself.
"""

import functools
import inspect
import io
import json
import math
import numbers
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from distflow.errors import UserError, hint
from distflow.graph.fields import is_async
from distflow.import_target import LoadError, load_function, split_name
from distflow.observe.files import JSON, write_atomically
from distflow.registry import CUSTOM_REWARD, REWARDS
from distflow.rewards.score import ACC

SUFFIX = ".pkl"
_HEAD = b"distflow reward "


def write_function(function: Callable[..., object], fingerprint: str, file: Path) -> None:
    """A line with the fingerprint, then the pickle. Raises UserError naming what it holds that no other process can
    have, e.g. a lock or an open connection."""
    try:
        data = _pickled(function)
    except Exception as error:  # the queue: whatever an object of the user's raises when it is pickled
        raise UserError(
            f"the reward {name_of(function)} runs in a process of its own, and what it refers to cannot be sent there: "
            f"{_culprit(function) or error}. Make it inside the function, once, in a function of its own under "
            "@functools.cache; or put the reward into a .py file and set custom_reward_function.path"
        ) from error
    write_atomically(file, _HEAD + fingerprint.encode() + b"\n" + data)


def read_function(file: Path) -> Callable[..., object]:
    """Raises LoadError where it cannot be read here: a module that it needs is missing, say."""
    try:
        return cast(Callable[..., object], pickle.loads(file.read_bytes().partition(b"\n")[2]))
    except Exception as error:  # the edge of a user's code
        raise LoadError(
            f"'{file}' cannot be read ({type(error).__name__}: {error}): give the function again"
        ) from error


def read_fingerprint(file: Path) -> str:
    """Without running anything. Raises OSError."""
    return file.read_bytes().partition(b"\n")[0].removeprefix(_HEAD).decode(errors="replace")


def name_of(function: Callable[..., object]) -> str:
    """Its own, that of what it wraps, or its class's."""
    plain = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = plain.func
    return str(getattr(plain, "__name__", type(plain).__name__))


def _pickled(value: object) -> bytes:
    from cloudpickle import CloudPickler

    class Pickler(CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _cached(function: Callable[..., object], parameters: dict[str, Any]) -> Callable[..., object]:
    return functools.lru_cache(**parameters)(function)


def _culprit(function: Callable[..., object]) -> str:
    """The variable of the function that cannot be written, where it is one that it names itself."""
    for name, value in _variables(inspect.unwrap(function)):
        try:
            _pickled(value)
        except Exception as error:  # as above
            return f"its variable '{name}' ({type(error).__name__}: {error})"
    return ""


def _variables(function: Callable[..., object]) -> Iterator[tuple[str, object]]:
    if isinstance(function, FunctionType):
        found = inspect.getclosurevars(function)
        yield from {**found.nonlocals, **found.globals}.items()


MAX_TEXT = 4000
"""Characters of one text; of a longer one both ends are kept."""
MAX_IN_ALL = 20_000
"""Characters of all that a verifier says of one sample."""
_MAX_ENTRIES, _MAX_DEPTH = 50, 6
_LEFT_OUT = "… left out"


def bounded(remarks: Mapping[object, object]) -> dict[str, JSON]:
    """What JSON can hold of it, long texts without their middle, and what comes behind `MAX_IN_ALL` left out."""
    return _Room().mapping(remarks, 0)


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """At most `most` characters of a text and a word on what is missing between its ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


class _Room:
    def __init__(self) -> None:
        self._left = MAX_IN_ALL

    def mapping(self, value: Mapping[object, object], depth: int) -> dict[str, JSON]:
        found: dict[str, JSON] = {}
        for key, entry in value.items():
            if len(found) == _MAX_ENTRIES or self._left <= 0:
                found[_LEFT_OUT] = len(value) - len(found)
                break
            name = str(key)[:200]
            self._left -= len(name)
            found[name] = self._plain(entry, depth + 1)
        return found

    def _plain(self, value: object, depth: int) -> JSON:
        self._left -= 4
        if isinstance(value, bool | float | None):
            return value
        if isinstance(value, int):
            return value if abs(value) < 2**63 else self._text(f"an integer of {value.bit_length():,} bits")
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            return self.mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset) and depth < _MAX_DEPTH:
            return self._list(list(value), depth)
        return self._text(f"{value!r:.1000}" if not isinstance(value, Mapping | list | tuple | set) else _LEFT_OUT)

    def _list(self, value: list[object], depth: int) -> list[JSON]:
        found: list[JSON] = []
        for entry in value:
            if len(found) == _MAX_ENTRIES or self._left <= 0:
                return [*found, f"{_LEFT_OUT}: {len(value) - len(found):,}"]
            found.append(self._plain(entry, depth + 1))
        return found

    def _text(self, text: str) -> str:
        kept = shortened(text, min(MAX_TEXT, max(self._left, 100)))
        self._left -= len(kept)
        return kept


PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
PROMPT, PROMPTS = "prompt", "prompts"
"""The prompt's text, for an async function that names it; those of all answers, for a batched one."""
FAILS, FAILS_TARGET = "(a probe that fails)", "distflow.rewards.self_check:fail"
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
