"""Python that the user named in the config: "module:name" or "file.py:name", loaded once."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(target: str) -> Callable[..., Any]:
    """The function that `target` names. Raises ValueError where there is none.

    Whatever the module raises while it is imported passes through.
    """
    path, _, name = target.rpartition(":")
    module = _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"'{path}' has no function '{name}'; its functions: {', '.join(known) or 'none'}")
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file '{path}'")
    name = f"distflow_user_code_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up
    spec.loader.exec_module(module)
    return module
