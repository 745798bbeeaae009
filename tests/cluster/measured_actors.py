"""The actors of a run, which note how large all is that comes to them and goes from them, as Ray
would send it."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from distflow.cluster.coordinator_actor import CoordinatorActor
from distflow.cluster.worker_actor import WorkerActor
from distflow.runtime.spec import Spec

SIZES = "sizes.jsonl"


def size(value: object) -> int:
    context = ray._private.worker.global_worker.get_serialization_context()
    return int(context.serialize(value).total_bytes)


def note(file: Path, what: str, value: object) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps([what, size(value)]) + "\n")


def noted(method: Callable[..., Any], takes: bool) -> Callable[..., Any]:
    """takes: its arguments are measured too."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        what = f"{type(self).__name__}.{method.__name__}"
        if takes:
            note(self.sizes, f"to {what}", arguments)
        result = method(self, *arguments)
        note(self.sizes, f"from {what}", result)
        return result

    return call


def methods(actor: type) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(actor, inspect.isfunction)
        if name[0] != "_"
    }


class MeasuredCoordinator(CoordinatorActor):
    """All that comes to it, but for the blueprint, and all that it answers."""

    def __init__(self, spec: Spec, *rest: Any) -> None:
        self.sizes = spec.run_dir.parent / SIZES
        note(self.sizes, "to MeasuredCoordinator", rest)
        super().__init__(spec, *rest)


class MeasuredWorker(WorkerActor):
    """What it answers; `receive` and `validate` answer another worker."""

    def __init__(self, spec: Spec, *rest: Any) -> None:
        self.sizes = spec.run_dir.parent / SIZES
        super().__init__(spec, *rest)


for _name, _method in methods(CoordinatorActor).items():
    setattr(MeasuredCoordinator, _name, noted(_method, takes=True))
for _name, _method in methods(WorkerActor).items():
    if _name not in ("receive", "validate"):
        setattr(MeasuredWorker, _name, noted(_method, takes=False))
