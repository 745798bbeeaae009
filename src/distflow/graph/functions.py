"""The callable behind a node's `func`: itself, "module:attr", "module:Class.method" or "module.func"."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

from distflow.graph.errors import PipelineError, hint


def resolve_func(func: Any, where: str) -> Callable[..., Any]:
    """The callable behind a node's `func`.

    A method that is neither static nor a class method is bound to an instance made without arguments.
    Raises PipelineError, opened by `where`, if the module or the attribute is not there or cannot be called.
    """
    fn = _load(func, where) if isinstance(func, str) else func
    if isinstance(fn, type):
        raise PipelineError(f"{where}: {_shown(func)} is a class; name one of its methods or give an instance")
    if not callable(fn):
        raise PipelineError(f'{where}: {_shown(func)} cannot be called; give a function or "module:function"')
    return fn


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _shown(func: Any) -> str:
    return f"'{func}'" if isinstance(func, str) else f"func {func!r}"


def _load(path: str, where: str) -> Any:
    module_name, separator, attributes = path.partition(":") if ":" in path else path.rpartition(".")
    if not (separator and module_name and attributes):
        raise PipelineError(f"{where}: '{path}' names no function; write \"module:function\"")
    owner: Any = _import(module_name, path, where)
    found = owner
    for name in attributes.split("."):
        owner, found = found, getattr(found, name, None)
        if found is None:
            kind = "module" if isinstance(owner, ModuleType) else "class"
            public = [other for other in dir(owner) if not other.startswith("_")]
            raise PipelineError(
                f"{where}: {kind} '{owner.__name__}' has no '{name}' (func '{path}'){hint(name, public)}"
            )
    return _bound(owner, name, found, path, where)


def _bound(owner: Any, name: str, found: Any, path: str, where: str) -> Any:
    if not (isinstance(owner, type) and inspect.isfunction(found)):
        return found
    if isinstance(inspect.getattr_static(owner, name), staticmethod):
        return found
    required = [
        p.name
        for p in inspect.signature(owner).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if required:
        raise PipelineError(
            f"{where}: '{path}' is a method, and {owner.__name__} needs {', '.join(required)} to be made; "
            "make it a static method, or give the method of an instance"
        )
    return getattr(owner(), name)


def _import(name: str, path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise PipelineError(
                f"{where}: module '{missing}' not found (func '{path}'){hint(missing, _siblings(missing))}"
            ) from error
        raise PipelineError(f"{where}: module '{name}' needs '{missing}', which is not installed") from error
    except (ImportError, SyntaxError) as error:
        raise PipelineError(f"{where}: module '{name}' cannot be imported: {error}") from error


def _siblings(name: str) -> list[str]:
    """Modules beside the one that is not there."""
    package, _, _ = name.rpartition(".")
    if not package:
        return [module.name for module in pkgutil.iter_modules() if not module.name.startswith("_")]
    return [f"{package}.{m.name}" for m in pkgutil.iter_modules(importlib.import_module(package).__path__)]
