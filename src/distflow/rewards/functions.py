"""Reward functions: loading by name, calling, reading what they return, pickling those passed from Python.

A pickle holds the name of a function of an importable module, else its code and what that refers to. Like a `.py` file
it is executable code, and is loaded only if a config names it.
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

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.errors import UserError, hint
from distflow.graph.fields import is_async
from distflow.import_target import LoadError, load_function, split_name
from distflow.observe.files import JSON, write_atomically
from distflow.rewards.score import ACC

SUFFIX = ".pkl"
_HEAD = b"distflow reward "


def write_function(function: Callable[..., object], fingerprint: str, file: Path) -> None:
    """Write a line with the fingerprint, then the pickle. Raises UserError naming what cannot be pickled, e.g. a lock
    or an open connection."""
    try:
        data = _pickled(function)
    except Exception as error:  # a user's object may raise anything when it is pickled
        raise UserError(
            f"the reward function {name_of(function)} runs in another process, and what it refers to cannot be sent "
            f"there: {_culprit(function) or error}. Make it inside the function, once, in a function of its own under "
            "@functools.cache; or put the function into a .py file and set custom_reward_function.path"
        ) from error
    write_atomically(file, _HEAD + fingerprint.encode() + b"\n" + data)


def read_function(file: Path) -> Callable[..., object]:
    """Unpickle the function. Raises LoadError if that fails, e.g. because a module is missing."""
    try:
        return cast(Callable[..., object], pickle.loads(file.read_bytes().partition(b"\n")[2]))
    except Exception as error:  # user code
        raise LoadError(
            f"'{file}' cannot be read ({type(error).__name__}: {error}): pass the function again"
        ) from error


def read_fingerprint(file: Path) -> str:
    """The fingerprint in the file, read without running any code. Raises OSError."""
    return file.read_bytes().partition(b"\n")[0].removeprefix(_HEAD).decode(errors="replace")


def name_of(function: Callable[..., object]) -> str:
    """Name of the function, of the function it wraps, or of its class."""
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
    """The variable of the function that cannot be pickled, if the function itself names it."""
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
"""Characters of one text; a longer one keeps both ends."""
MAX_IN_ALL = 20_000
"""Characters of all extra values that a reward function returns for one sample."""
_MAX_ENTRIES, _MAX_DEPTH = 50, 6
_LEFT_OUT = "… left out"


def bounded(remarks: Mapping[object, object]) -> dict[str, JSON]:
    """The remarks as JSON: long texts are cut in the middle, and everything after `MAX_IN_ALL` is left out."""
    return _SizeLimit().mapping(remarks, 0)


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """At most `most` characters of a text, with a note on what is missing in the middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


class _SizeLimit:
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
"""The prompt's text, for an async function with this parameter; those of all responses, for a batched one."""
FAILS, FAILS_TARGET = "(a probe that fails)", "distflow.rewards.self_check:fail"
"""A function of every pool that must return a reward error; the auditor calls it."""

_OPTIONS = "?"
BATCHED = {"data_sources": "data_source", "solution_strs": "solution_str"} | {
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
"""Parameters of a batched reward function, as in verl: lists with an entry for each response."""

Parts = Sequence[tuple[str, float] | tuple[str, float, Mapping[str, object]]]
"""(name, weight), and the part's options if it has any."""
Functions = Mapping[str, Parts]
"""The parts by domain."""


def with_options(target: str, options: Mapping[str, object]) -> str:
    """A target with the options of its function, for `load_reward`."""
    return f"{target}{_OPTIONS}{json.dumps(options, sort_keys=True)}" if options else target


def find_targets(parts: Parts, custom: tuple[str, str] | None) -> dict[str, str]:
    """The targets that a pool loads, by name. custom: path and name of the user's function, for the name "custom".

    Raises UserError for an unknown name.
    """
    targets = {name: with_options(target_of(name, custom), given[0] if given else {}) for name, _, *given in parts}
    return {**targets, FAILS: FAILS_TARGET}


def custom_target(path: str, name: str) -> str:
    """`custom_reward_function.path` and `.name` as one "module:function" or "file.py:function", the file absolute."""
    if path.endswith((".py", SUFFIX)):
        return f"{Path(path).expanduser().resolve()}:{name}"
    return f"{path}:{name}"


def load_reward(target: str) -> Callable[..., object]:
    """The function that "module:function" or "/path/file.py:function" names, or that was passed from Python, with
    the options of a "?" and a JSON object after it.

    Also loads what a built-in needs. Raises LoadError if there is no such function or its parameters or options do not
    match; UserError if what it needs cannot be loaded.
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
    """Which option the function does not take: options are parameters with a default, of the default's type."""
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
    """Why its parameters are not those of a reward function; empty if they are."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return "has no signature: wrap it in a Python function"
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
        f"takes ({', '.join(required)}): a reward function takes some of ({', '.join(PARAMETERS)}), or, for all "
        f"responses to a prompt at once, of ({', '.join(BATCHED)}); one over columns of a batch is a node of a custom "
        "pipeline"
    )


def is_batched(function: Callable[..., object]) -> bool:
    """Whether it takes lists, with an entry for each response to a prompt."""
    return any(name in BATCHED for name in inspect.signature(function).parameters)


def takes_groups(function: Callable[..., object]) -> bool:
    """Whether it gets all responses to a prompt at once: it is batched, or async, so that they wait together."""
    return is_batched(function) or is_async(function)


def call(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Call it by keyword with those of `PARAMETERS` that it takes, and with the prompt if it takes it and there is
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
    """The entries that a batched reward function returned. Raises ValueError unless it is a sequence of that length."""
    if callable(tolist := getattr(returned, "tolist", None)):
        returned = tolist()  # tensors and arrays
    if not isinstance(returned, list | tuple) or len(returned) != length:
        what = f"{len(returned)} scores" if isinstance(returned, list | tuple) else f"{returned!r:.80}"
        raise ValueError(
            f"it returned {what} for {length} responses: a batched reward function returns a list of as many"
        )
    return list(returned)


def read_score(returned: object) -> tuple[float, dict[str, JSON]]:
    """The score, and the other entries of a dictionary within bounds (only `acc` is used). Raises ValueError for a
    score or an `acc` that is not a finite number."""
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
    """float of a number, bool, or numpy or torch scalar. Raises ValueError for anything else."""
    if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
        value = item()  # those with more than one element raise here
    if not isinstance(value, numbers.Real):
        raise ValueError(f"it returned {value!r:.80}{where}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"it returned{where} a number that is too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}{where}, which is not finite")
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
