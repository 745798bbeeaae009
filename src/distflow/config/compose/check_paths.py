"""Finds missing files and folders that a config names, before anything is loaded."""

import importlib.util
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from distflow.builtin_names import HUB_DATA, MODELS
from distflow.config import derived_settings
from distflow.config.keys.schema import Config
from distflow.config.rules import MODEL
from distflow.config.rules.check_config import where
from distflow.errors import Problem, missing_path, nearest
from distflow.hub_id_or_local_path import WEIGHT_PATTERNS, model_fault
from distflow.import_target import SourceFile, split_name
from distflow.untrusted_files import (
    MAX_SOURCE_BYTES,
    is_compressed,
    matching_files,
    pointer_fault,
    read_file,
)

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_FUNCTION_IN_FILE = re.compile(r".*\.py:[A-Za-z_][\w.]*")
_FUNCTION_IN_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_TRAIN = "data.train_files"
_MAX_INDEX_BYTES = 64 * 2**20
_DOMAINS = re.compile(r"data\.domains\.[\w.-]+(?=\.)")
NEEDED_TO_EVALUATE = frozenset(
    (
        "data.val_files",
        "data.reward",
        "reward.functions",
        "custom_reward_function.path",
        f"{MODEL}.path",
        f"{MODEL}.tokenizer_path",
        "critic.model.path",
        "actor_rollout_ref.ref.path",
        "reward_model.model.path",
        "reward_model.models",
        "dag.pipeline",
        derived_settings.WORKFLOW,
    )
)
_SHOULD_ACCEPT = "algorithm.filter_groups.should_accept"
NEEDED_TO_TRAIN = NEEDED_TO_EVALUATE | {
    _TRAIN,
    _SHOULD_ACCEPT,
    derived_settings.POLICY_LOSS,
    derived_settings.ADV_ESTIMATOR,
}
"""Keys of files and folders that must exist; `data.reward` is the domains' key."""


def find_missing(
    config: Config, origins: Mapping[str, str], needed: Collection[str]
) -> Iterator[Problem]:
    for key, path, fault in _named(config):
        try:
            found = None
            if _DOMAINS.sub("data", key) in needed:
                found = fault(path)
        # in a folder of somebody else's, too long, or of an unknown ~user
        except (OSError, RuntimeError) as error:
            found = f"cannot be read: {getattr(error, 'strerror', None) or error}", "check the path"

        if found:
            yield Problem(((f"{key} = '{path}'", where(key, origins)),), *found)


def is_incomplete(config: Config) -> bool:
    """Whether it names no model or no data, like a preset."""
    has_data = any(derived_settings.data_files(config, "train_files").values())
    is_custom = derived_settings.pipeline_name(config) == derived_settings.CUSTOM
    return not config.actor_rollout_ref.model.path or not (has_data or is_custom)


Fault = Callable[[str], tuple[str, str] | None]
"""Finds (problem, advice) of a path; None if there is no problem visible without loading it."""


def _named(config: Config) -> Iterator[tuple[str, str, Fault]]:
    """Every path with its key and its check."""
    for key, path in _models(config):
        if path:
            yield key, path, model_fault

    model = config.actor_rollout_ref.model
    if model.path and model.init != "random":
        yield f"{MODEL}.path", model.path, _weights_fault

    files = derived_settings.data_files(config, "val_files")
    files |= derived_settings.data_files(config, "train_files")
    for key, paths in files.items():
        for path in paths:
            if path.strip():
                yield key, path, data_fault

    custom = config.custom_reward_function
    if custom.path and derived_settings.is_rl(config):
        yield "custom_reward_function.path", custom.path, partial(_reward_fault, custom.name)
    for key, function in _functions(config):
        yield key, function, _function_fault


def _models(config: Config) -> Iterator[tuple[str, str | None]]:
    model = config.actor_rollout_ref.model
    yield f"{MODEL}.path", model.path
    yield f"{MODEL}.tokenizer_path", model.tokenizer_path
    if derived_settings.may_have_critic(config):
        yield "critic.model.path", config.critic.model.path
    yield "actor_rollout_ref.ref.path", config.actor_rollout_ref.ref.path
    yield "reward_model.model.path", config.reward_model.model.path
    for scoring in config.reward_model.models.values():
        yield "reward_model.models", scoring.path
    yield "distill.teacher.path", config.distill.teacher.path
    for teacher in config.distill.teachers.values():
        yield "distill.teachers", teacher.path


def _functions(config: Config) -> Iterator[tuple[str, str]]:
    for parts in config.reward.functions.values():
        for part in parts:
            yield "reward.functions", part.name

    for name, domain in config.data.domains.items():
        for part in domain.reward:
            yield f"data.domains.{name}.reward", part.name

    if should_accept := config.algorithm.filter_groups.should_accept:
        yield _SHOULD_ACCEPT, should_accept
    if sampler := config.data.sampler:
        yield "data.sampler", sampler
    yield from derived_settings.named_algorithms(config)
    if workflow := config.actor_rollout_ref.rollout.workflow:
        yield derived_settings.WORKFLOW, workflow
    for name in derived_settings.functions_of_pipeline(config):
        yield "dag.pipeline", name


def data_fault(source: str) -> tuple[str, str] | None:
    """Checks a path of `data.train_files`."""
    path = Path(source).expanduser()
    folder = Path(source.partition(":")[0]).expanduser()

    if path.is_file():
        known = path.suffix.lower() in DATA_SUFFIXES or is_compressed(path)
        advice = f"rename it, or save it as one of {', '.join(DATA_SUFFIXES)}"
        if known:
            return pointer_fault(path)
        return (f"its extension '{path.suffix}' is not a known format", advice)

    if found := matching_files(source):
        return next(filter(None, (data_fault(str(file)) for file in found)), None)
    if source.startswith("builtin:") or folder.is_dir():
        return None
    if _FUNCTION_IN_FILE.fullmatch(source):
        return _function_fault(source)
    if _FUNCTION_IN_MODULE.fullmatch(source):
        return _code_fault(source.partition(":")[0])

    is_hub_id = (
        HUB_DATA.fullmatch(source)
        and path.suffix.lower() not in DATA_SUFFIXES
        and not folder.parent.is_dir()
    )
    return None if is_hub_id else missing_path(path)


def is_local_data(source: str) -> bool:
    return (
        source.startswith("builtin:")
        or Path(source).expanduser().is_file()
        or bool(matching_files(source))
    )


def _weights_fault(text: str) -> tuple[str, str] | None:
    """Checks a model whose weights are to be loaded."""
    prefix, _, name = text.rpartition(":")
    if prefix != "builtin":
        folder = Path(text).expanduser()
        files = []
        for pattern in WEIGHT_PATTERNS:
            files.extend(sorted(folder.glob(pattern)))

        if not files and (folder / "config.json").is_file() and not [*folder.glob("*.gguf")]:
            return (
                f"it has no weights ({', '.join(WEIGHT_PATTERNS)})",
                f"complete it, or set {MODEL}.init=random",
            )

        return next(filter(None, map(pointer_fault, files)), None)

    if name not in MODELS:
        return f"there is no built-in model '{name}'", f"there are: {', '.join(MODELS)}"

    return (
        "a built-in model has no weights",
        f"set {MODEL}.init=random for new ones by trainer.seed",
    )


def _reward_fault(function: str, path: str) -> tuple[str, str] | None:
    """Checks a file or module whose function has its own key."""
    # a function passed from Python, saved by distflow.rewards.function_loading
    if path.endswith(".pkl"):
        kept = Path(path).expanduser()
        return None if kept.is_file() else missing_path(kept)

    fault = _code_fault(path)
    if fault is None and path.endswith(".py"):
        return _content_fault(
            Path(path).expanduser(), function, "set custom_reward_function.name={}"
        )

    return fault


def _function_fault(name: str) -> tuple[str, str] | None:
    """Checks the file of "file.py:function"."""
    module, function = split_name(name)
    if not module.endswith(".py"):
        return None
    return _code_fault(module) or _content_fault(
        Path(module).expanduser(), function, f"write {module}:{{}}"
    )


def _content_fault(file: Path, function: str, advice: str) -> tuple[str, str] | None:
    """Checks a Python file without running it: its syntax, and whether it binds the name. advice: a
    format string with a field for the name of an existing function."""
    try:
        source = SourceFile(read_file(file, max_bytes=MAX_SOURCE_BYTES))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = ""
        if isinstance(error, SyntaxError):
            line = f" (line {error.lineno})"

        return (
            f"is not valid Python: {type(error).__name__}: {error.args[0]}{line}",
            "look at that line",
        )
    except OSError as error:
        return f"cannot be read ({error.strerror})", "see who may read it"

    if source.defines(function.partition(".")[0]):
        return None

    functions = list(source.functions)
    meant = nearest(function, functions) or (functions[0] if len(functions) == 1 else "")

    listed = "it has no function"
    if functions:
        listed = f"it has {', '.join(functions)}"

    return f"it binds no '{function}': {listed}", advice.format(meant or "FUNCTION")


def _code_fault(name: str) -> tuple[str, str] | None:
    """Checks a Python file or an importable module."""
    path = Path(name).expanduser()
    if name.endswith(".py"):
        return None if path.is_file() else missing_path(path)

    top = name.partition(".")[0]
    is_path = path.exists() and not (path / "__init__.py").is_file()
    if is_path or not top.isidentifier() or importlib.util.find_spec(top) is None:
        return (
            f"there is no module '{top}'",
            "write a file with its extension, e.g. my_reward.py, or check PYTHONPATH",
        )

    return None
