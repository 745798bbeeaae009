"""Reward functions: loading by name, calling, pickling those passed from Python, and fingerprints.

A pickle has the name of a function of an importable module, else its code and the objects that it
references. Like a `.py` file it is executable code, loaded only if a config names it. The
fingerprint of a file is that of its content, the fingerprint of a function that of its code and
constants.
"""

import ast
import functools
import hashlib
import inspect
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from distflow.builtin_names import CUSTOM_REWARD, REWARDS
from distflow.errors import UserError, hint
from distflow.import_target import (
    PICKLED,
    LoadError,
    SourceFile,
    innermost,
    load_function,
    module_files,
    required_parameters,
    split_name,
)
from distflow.observe.crash_safe_files import write_atomically
from distflow.rewards.foreign_signatures import adapted, find_absent, is_foreign
from distflow.rewards.function_calls import _PLURALS, BATCHED, PARAMETERS, _accepted, is_batched

_HEAD = b"distflow reward "
_LENGTH = 12
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
FAILS = "(a probe that fails)"
FAILS_TARGET = "distflow.rewards.pool.faulty_test_functions:fail"
"""A function of every pool that must return a reward error, or a number from its arguments; the
checks call it."""

_NO_TRUTH = {
    "data_source",
    "data_sources",
    "solution_str",
    "solution_strs",
    "extra_info",
    "extra_infos",
}
_NO_TRUTH |= {*_PLURALS, *_PLURALS.values(), "completions", "completion_ids", "self"}
"""Parameters that never hold a row's ground truth."""
_OPTIONS = "?"
_ANSWER_KEY = "(column of the ground truth)"


def write_function(
    function: Callable[..., object],
    fingerprint: str,
    file: Path,
    key: str = "custom_reward_function.path",
    entry: object = None,
) -> None:
    """Write a line with the fingerprint, then the pickle. key: the one that names a function in a
    file. entry: contains the function, and is pickled in its place. Raises UserError with what
    cannot be pickled, e.g. a lock or an open connection."""
    data = _pickled(entry or function)
    if isinstance(data, Exception):
        raise UserError(
            f"the function {name_of(function)} ({key}) runs in another process, and an object that "
            f"it uses cannot be sent there: {data}. Create it inside the function, once, in a "
            "separate function with @functools.cache; or put the function into a .py file and set "
            f"{key}"
        ) from data

    write_atomically(file, _HEAD + fingerprint.encode() + b"\n" + data)


def name_of(function: Callable[..., object]) -> str:
    """Name of the function, of the function it wraps, or of its class."""
    plain = innermost(inspect.unwrap(function))
    return str(getattr(plain, "__name__", type(plain).__name__))


def with_options(target: str, options: Mapping[str, object]) -> str:
    """A target with the options of its function, for `load_reward`."""
    if options:
        return f"{target}{_OPTIONS}{json.dumps(options, sort_keys=True)}"
    return target


def without_options(target: str) -> str:
    """The function's name without options, for messages."""
    return target.partition(_OPTIONS)[0]


def with_answer_key(target: str, options: Mapping[str, object], answer_key: str) -> str:
    """The target for a user's function, which may take the ground truth by its column's name."""
    return with_options(
        target, options if answer_key == "answer" else {**options, _ANSWER_KEY: answer_key}
    )


def custom_target(path: str, name: str) -> str:
    """`custom_reward_function.path` and `.name` as one "module:function" or "file.py:function", the
    file absolute."""
    if path.endswith((".py", PICKLED)):
        return f"{Path(path).expanduser().resolve()}:{name}"
    return f"{path}:{name}"


def load_reward(target: str) -> Callable[..., object]:
    """The function that "module:function" or "/path/file.py:function" names, or that was passed
    from Python, with options from a "?" and a JSON object after it. Functions of TRL
    get our parameters.

    Also loads what a built-in needs. Raises LoadError if there is no such function or its
    parameters or options do not match; UserError if what it needs cannot be loaded.
    """
    target, _, options = target.partition(_OPTIONS)
    function = load_function(target)
    values = json.loads(options) if options else {}
    answer_key = values.pop(_ANSWER_KEY, "answer")
    fault = find_fault(function) or _fault_of_options(function, values)
    if fault:
        raise LoadError(f"'{target}' {fault}")

    for entry in REWARDS.values():
        if entry.prepare and entry.target == target:
            load_function(entry.prepare)(**values)

    if is_foreign(function):
        return adapted(function, values, answer_key)
    return partial(function, **values) if values else function


def reads_ground_truth(target: str) -> bool:
    """Whether a user's function uses the ground truth, or a column that may hold it, as its source
    says; True if there is no source to read."""
    module, name = split_name(without_options(target))
    source = None if module.endswith(PICKLED) else SourceFile.of(module)
    node = None if source is None else source.functions.get(name)
    if node is None:
        return True

    used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    plain = [*node.args.posonlyargs, *node.args.args]
    needed = [*plain[: len(plain) - len(node.args.defaults)], node.args.kwarg]
    needed += [
        each
        for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if value is None
    ]
    columns = {each.arg for each in needed if each is not None} - _NO_TRUTH

    return not used.isdisjoint(columns | {"ground_truth", "ground_truths"})


def find_fault(function: Callable[..., object]) -> str:
    """Why its parameters do not fit a reward function; empty if they do."""
    try:
        required = required_parameters(function)
    except ValueError:
        return "has no signature: wrap it in a Python function"

    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        return "has parameters before a '/', but arguments are passed by name: remove the '/'"
    if is_foreign(function):
        return find_absent(function)

    wanted = tuple(BATCHED) if is_batched(function) else PARAMETERS
    if all(name in wanted for name in required) and _accepted(function, wanted):
        return ""

    return (
        f"takes {inspect.signature(function)}: a reward function takes some of "
        f"({', '.join(PARAMETERS)}), or, for all responses to a prompt at once, of "
        f"({', '.join(BATCHED)}), or 'completions' as in TRL, and columns of the data; one over "
        "columns of a batch is a node of a custom pipeline"
    )


def target_of(name: str, custom: tuple[str, str] | None) -> str:
    """custom: path and name of the user's function, for the name "custom". Raises UserError for an
    unknown name."""
    if name == CUSTOM_REWARD:
        if custom is None or not custom[0]:
            raise UserError(
                "reward.functions names 'custom': set custom_reward_function.path to its file or "
                "module"
            )
        return custom_target(*custom)
    if name in REWARDS:
        return REWARDS[name].target
    if ":" in name:
        return custom_target(*split_name(name))

    raise UserError(
        f"reward.functions names '{name}', which is not a reward function{hint(name, REWARDS)}"
    )


def fingerprint_target(target: str) -> str:
    """Fingerprint of the file of a "module:function" or "file:function"; empty if it cannot be
    read."""
    path = split_name(target)[0]
    files = [Path(path)] if path.endswith((".py", PICKLED)) else module_files(path)

    try:
        content = next(file for file in files if file.is_file()).read_bytes()
    except (StopIteration, OSError):  # reported when it is loaded
        return ""

    if path.endswith(PICKLED):  # in its first line, so that none of its code runs
        return content.partition(b"\n")[0].removeprefix(_HEAD).decode(errors="replace")
    return _digest(content)


def fingerprint_function(function: Callable[..., object]) -> str:
    """Independent of the code's cell or line; includes helpers of the same module, but not
    imports."""
    return _digest(
        "\n".join(_lines(function, str(innermost(function).__module__), set())).encode(
            "utf-8", "surrogatepass"
        )
    )


def _pickled(value: object) -> bytes | Exception:
    """The pickle, or the error that prevents it."""
    from cloudpickle import CloudPickler

    class Pickler(CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(value)
    except Exception as error:  # a user's object may raise anything when pickled
        return error

    return buffer.getvalue()


def _cached(function: Callable[..., object], parameters: dict[str, Any]) -> Callable[..., object]:
    return functools.lru_cache(**parameters)(function)


def _fault_of_options(function: Callable[..., object], values: Mapping[str, object]) -> str:
    """The option that the function does not take; options are parameters with a default, of the
    default's type."""
    no_options = (*PARAMETERS, *BATCHED, *_PLURALS, *_PLURALS.values())
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty and name not in no_options
    }

    for name, value in values.items():
        if name not in known:
            return (
                f"takes no option '{name}'{hint(name, known)}; it takes "
                f"{', '.join(known) or 'none'}"
            )

        wanted = type(known[name])
        if (
            known[name] is not None
            and type(value) is not wanted
            and (wanted, type(value)) != (float, int)
        ):
            return f"takes for '{name}' a value like {known[name]!r}, not {value!r}"

    return ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LENGTH]


def _lines(value: object, module: str, seen: set[int]) -> Iterator[str]:
    """Lines that describe a value. module: functions and classes of other modules are described by
    name only. seen: ids of already described values, which may contain themselves."""
    yield type(value).__name__
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, FunctionType | type) and value.__module__ != module:
        yield f"{value.__module__}.{value.__qualname__}"
    elif id(value) not in seen:
        if isinstance(value, FunctionType | type | list | dict):
            seen.add(id(value))
        for part in _parts(value, module):
            yield from _lines(part, module, seen)


def _parts(value: object, module: str) -> Iterator[object]:
    """The parts of a value; none for an object without a stable description."""
    match value:
        case tuple() | list():
            yield from value
        case frozenset() | set():
            yield from sorted(map(repr, value))
        case dict():
            yield from value.items()
        case functools.partial():
            yield from (value.func, value.args, value.keywords)
        case functools._lru_cache_wrapper():
            yield value.__wrapped__
        case re.Pattern():
            yield value.pattern
        case ModuleType():
            yield value.__name__
        case MethodType():
            yield from (value.__func__, value.__self__)
        case CodeType():
            yield from (value.co_code, value.co_names, value.co_varnames, value.co_consts)
        case FunctionType():
            found = inspect.getclosurevars(value)
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
            yield from sorted({**found.nonlocals, **found.globals}.items())
        case type():
            for name, item in sorted(vars(value).items()):
                if isinstance(item, FunctionType) or (
                    isinstance(item, _PLAIN) and not name.startswith("__")
                ):
                    yield item
        case _ if type(value).__module__ == module:
            yield from (type(value), getattr(value, "__dict__", None))
