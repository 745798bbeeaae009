"""Rows of tasksets of the package `verifiers`: `verifiers:ID?name=value`, read in a separate process.

Only one kind of environment is supported: a task ends with one response, without tools, and its rewards need nothing
but that response. Any other is rejected with the name of the feature that it needs.
"""

import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from distflow.data.dataset_columns import Record
from distflow.data.python_rows import print_rows, read_printed_rows, read_settings
from distflow.errors import UserError

PREFIX = "verifiers:"
COLUMN = "verifiers"
"""Column with the input of a row's rewards: the taskset, its settings, and the task's data."""
MISSING = "needs the package verifiers: pip install 'distflow[verifiers]'"


def read_records(source: str, key: str, wanted: int = -1) -> Iterator[Record]:
    """The tasks of the taskset `source`, the first `wanted` of them if that is not negative, as rows with the columns
    prompt, answer (if the task has one), data_source (`verifiers/ID`) and `COLUMN`.

    Raises UserError, naming the config's `key`, if the package or the taskset is missing, or a task is not supported.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise UserError(f"{key}: '{source}' {MISSING}")
    name, _, query = source.removeprefix(PREFIX).partition("?")
    arguments = (name, json.dumps(read_settings(query)), str(wanted))
    yield from read_printed_rows("distflow.data.verifiers_tasks", arguments, source, key)


def load_taskset(name: str, settings: Mapping[str, object]) -> Any:
    """Raises UserError for an unknown taskset or setting."""
    from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

    try:
        return taskset_class(name)(taskset_config_type(name).model_validate({**settings, "id": name}))
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:  # others end the process
        reason = " ".join(str(error).split())[:500]
        raise UserError(f"the taskset '{name}' cannot be loaded: {type(error).__name__}: {reason}") from error


def find_fault(name: str, taskset: Any, task: Any) -> str:
    """The unsupported feature that the task needs; empty if one response is enough."""
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
    if own := [hook for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(Task, hook)]:
        return f"a runtime ({own[0]})"
    if task.data.prompt is None:
        return "a user who opens the conversation"
    signals = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    for signal in signals:
        runtime = inspect.signature(signal).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            return f"a runtime (for {getattr(signal, '__name__', 'a judge')})"
    if not task.hooks("reward") and not task.plugged_judges():
        return "a reward: it has none"
    return ""


def read_task(name: str, settings: Mapping[str, object], data: object) -> Any:
    """The task of a row, from the values in its `COLUMN`."""
    taskset = load_taskset(name, settings)
    kind = type(taskset).task_type()
    return kind(kind.data_type().model_validate(data), taskset.config.task)


def _row(name: str, settings: Mapping[str, object], task: Any) -> dict[str, object]:
    data = task.data.model_dump(mode="json", exclude_none=True)
    prompt = data["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if "system_prompt" in data:
        messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
    row = {"prompt": messages, "data_source": f"verifiers/{name}"}
    row |= {"answer": data["answer"]} if "answer" in data else {}
    return {**row, COLUMN: {"name": name, "settings": dict(settings), "task": data}}


def _generate_rows(name: str, settings: Mapping[str, object], wanted: int) -> Iterator[dict[str, object]]:
    taskset = load_taskset(name, settings)
    if wanted < 0 and not taskset.bounded:
        raise UserError("the taskset is infinite: set data.train_max_samples (of the domain, if it has one)")
    for task in taskset if wanted < 0 else taskset.take(wanted):
        if fault := find_fault(name, taskset, task):
            raise UserError(
                f"task {task.data.idx} needs {fault}, which is not implemented yet (single-turn tasks only)"
            )
        yield _row(name, settings, task)


if __name__ == "__main__":
    print_rows(_generate_rows(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
