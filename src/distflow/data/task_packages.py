"""Rows of tasks from other packages: of the procedural data sets of `reasoning-gym`, as
`reasoning-gym:NAME?size=100&seed=7&min_terms=2`, and of the tasksets of `verifiers`, as
`verifiers:ID?name=value`.

They are generated in a separate process,
`python -P -m distflow.data.task_packages PACKAGE NAME SETTINGS WANTED`, which confines imports of
the package, and has fixed string hashes: some data sets depend on these, and the same seed must
give the same rows.

A task of `verifiers` that ends with one response, without tools, and whose rewards need only that
response, can be scored by the reward `verifiers`. Any other has what it `needs` in its column; the
workflow `verifiers` plays it.
"""

import ast
import dataclasses
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any
from urllib.parse import parse_qsl

from distflow.data.dataset_columns import FileRow
from distflow.errors import UserError, hint
from distflow.observe.crash_safe_files import JSON

GYM = "reasoning_gym"
VERIFIERS = "verifiers"
"""Columns for the reward functions: name and settings of the data set or taskset, and the row's
entry or task. They are also the names of the packages' modules."""
PACKAGES = {"reasoning-gym": GYM, "verifiers": VERIFIERS}
_SIZE = 500
_SEED = 0


def missing(package: str) -> str:
    return f"needs the package {package}: pip install 'distflow[{package}]'"


def read_package_rows(source: str, key: str, wanted: int) -> Iterator[FileRow]:
    """The rows of `source`, the first `wanted` of them if that is not negative.

    A row has the columns prompt, answer (if the task has one), data_source (`PACKAGE/NAME`) and the
    package's own. Raises UserError, naming the config's `key`, if a package, a data set or a
    setting does not exist, or a task is not supported.
    """
    package, _, rest = source.partition(":")
    name, _, query = rest.partition("?")
    if importlib.util.find_spec(PACKAGES[package]) is None:
        raise UserError(f"{key}: '{source}' {missing(package)}")

    settings = _read_settings(query)
    if package == "reasoning-gym":
        size = settings.get("size", _SIZE)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"{key}: '{source}': size is {size!r}, not a number of rows")
        settings = {"seed": _SEED, **settings, "size": size}

    process = subprocess.run(
        [sys.executable, "-P", "-m", __name__, package, name, json.dumps(settings), str(wanted)],
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        },
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if process.returncode:
        reason = (
            process.stderr.strip() or f"its process ended with {process.returncode}"
        ).splitlines()[-1]
        raise UserError(f"{key}: '{source}' returned no rows: {reason}")

    for number, line in enumerate(process.stdout.rstrip("\n").split("\n"), 1):
        found = json.loads(line)
        if "error" in found:
            raise UserError(f"{key}: '{source}': {found['error']}")
        yield f"{source}, row {number}", found


def _read_settings(query: str) -> dict[str, JSON]:
    """The settings in `a=1&b=x`: values that are JSON are parsed, others are strings."""
    settings: dict[str, JSON] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        try:
            settings[name] = json.loads(text)
        except ValueError:
            settings[name] = text

    return settings


def read_entry(text: str) -> dict[str, object]:
    """An entry of a data set of `reasoning-gym`. Raises ValueError if it is invalid."""
    try:
        entry = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        entry = json.loads(text)

    if not isinstance(entry, dict):
        raise ValueError(f"the row's entry is not a mapping, but {text:.80}")
    return entry


def write_entry(entry: Mapping[str, object]) -> str:
    """As a Python literal, which keeps tuples and keys that are not str; else as JSON."""
    text = repr(entry)
    try:
        same = ast.literal_eval(text) == entry
    except (ValueError, SyntaxError):
        same = False
    return text if same else json.dumps(entry)


def make_dataset(name: str, settings: Mapping[str, object]) -> Any:
    """A data set of `reasoning-gym`. Raises UserError for an unknown name or setting, or one that
    it rejects."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no data set '{name}'{hint(name, DATASETS)}")

    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    if unknown := [setting for setting in settings if setting not in known]:
        raise UserError(f"'{name}' has no setting '{unknown[0]}'{hint(unknown[0], known)}")

    try:
        return create_dataset(name, **settings)
    # the package uses assertions for its checks
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"'{name}' rejects its settings {json.dumps(dict(settings))}: {reason}"
        ) from error


def _gym_rows(name: str, settings: Mapping[str, Any], wanted: int) -> Iterator[dict[str, object]]:
    dataset = make_dataset(name, settings)
    for index in range(settings["size"] if wanted < 0 else min(settings["size"], wanted)):
        entry = dataset[index]
        origin = {"name": name, "settings": settings, "entry": write_entry(entry)}
        row = {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "data_source": f"reasoning-gym/{name}",
        }
        yield {**row, GYM: origin}


def load_taskset(name: str, settings: Mapping[str, object]) -> Any:
    """A taskset of `verifiers`. Raises UserError for an unknown one, or an unknown setting."""
    from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

    try:
        return taskset_class(name)(
            taskset_config_type(name).model_validate({**settings, "id": name})
        )
    # others end the process
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:500]
        raise UserError(
            f"the taskset '{name}' cannot be loaded: {type(error).__name__}: {reason}"
        ) from error


def find_need(name: str, taskset: Any, task: Any) -> str:
    """What the task needs besides one response; empty if that is enough."""
    from verifiers.v1 import Env, Task
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils.loaders import environment_class

    kind = type(task)
    environment: type[Env] = environment_class(name)
    if environment is not SingleAgentEnv:
        return f"an environment of its own ({environment.__name__})"
    if kind.NEEDS_CONTAINER:
        return "a container"
    if type(taskset).toolsets(taskset.config) or kind.toolsets(task.config):
        return "tools"
    if own := [
        hook for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(Task, hook)
    ]:
        return f"a runtime ({own[0]})"
    if task.data.prompt is None:
        return "a user who opens the conversation"

    signals = [
        *task.hooks("reward"),
        *task.hooks("metric"),
        *(judge.score for judge in task.plugged_judges()),
    ]
    for signal in signals:
        runtime = inspect.signature(signal).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            return f"a runtime (for {getattr(signal, '__name__', 'a judge')})"

    if not task.hooks("reward") and not task.plugged_judges():
        return "a reward: it has none"
    return ""


def read_task(name: str, settings: Mapping[str, object], data: object) -> Any:
    """The task of a row, from the values in its column `VERIFIERS`."""
    taskset = load_taskset(name, settings)
    kind = type(taskset).task_type()
    return kind(kind.data_type().model_validate(data), taskset.config.task)


def _task_rows(
    name: str, settings: Mapping[str, object], wanted: int
) -> Iterator[dict[str, object]]:
    taskset = load_taskset(name, settings)
    if wanted < 0 and not taskset.bounded:
        raise UserError(
            "the taskset is infinite: set data.train_max_samples (of the domain, if it has one)"
        )

    for task in taskset if wanted < 0 else taskset.take(wanted):
        data = task.data.model_dump(mode="json", exclude_none=True)

        # the environment may open
        prompt = data.get("prompt") or data.get("name") or f"task {task.data.idx}"
        messages = prompt
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]

        if "system_prompt" in data:
            messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
        row = {"prompt": messages, "data_source": f"verifiers/{name}"}
        row |= {"answer": data["answer"]} if "answer" in data else {}
        origin = {
            "name": name,
            "settings": dict(settings),
            "needs": find_need(name, taskset, task),
            "task": data,
        }
        yield {**row, VERIFIERS: origin}


def _print_rows(rows: Iterable[Mapping[str, object]]) -> None:
    """Print rows, or an error, for `read_package_rows`; other output of their code goes to standard
    error."""
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        try:
            for row in rows:
                print(json.dumps(row, default=str), file=out)
        except UserError as error:
            print(json.dumps({"error": str(error)}), file=out)


if __name__ == "__main__":
    _rows_of = {"reasoning-gym": _gym_rows, "verifiers": _task_rows}[sys.argv[1]]
    _print_rows(_rows_of(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])))
