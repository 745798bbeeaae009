"""The callable behind a node's `func`: itself, or what its name leads to."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeGuard

from distflow.config.functions import LoadError, load_function
from distflow.graph.errors import PipelineError


def resolve_func(func: object, where: str) -> Callable[..., object]:
    """The callable behind a node's `func`; a text is a name as `load_function` takes it.

    Raises PipelineError, opened by `where`, if it leads to nothing that can be called.
    """
    if isinstance(func, str):
        try:
            return load_function(func)
        except LoadError as err:
            raise PipelineError(f"{where}: {err}") from err
    if isinstance(func, type):
        raise PipelineError(f"{where}: func {func!r} is a class; name one of its methods or give an instance")
    if not callable(func):
        raise PipelineError(f'{where}: func {func!r} cannot be called; give a function or "module:function"')
    return func


def innermost(fn: Callable[..., object]) -> Callable[..., object]:
    """The function below any `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def is_async(fn: Callable[..., object]) -> TypeGuard[Callable[..., Awaitable[object]]]:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
