"""Functions and classes named in a table, a config or a pipeline, loaded when needed.

A name is "module:function", "module.function", "module:Class.method" or "file.py:function"; or
"file.pkl:function" for one that was passed from Python.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from distflow.errors import UserError, hint, users_place
from distflow.untrusted_files import MAX_SOURCE_BYTES, read_file
from distflow.user_files import file_of, module_of

PICKLED = ".pkl"


class LoadError(UserError):
    """A name cannot be resolved. The message has the name; callers prepend the key that it came
    from."""


def load_function(path: str) -> Callable[..., object]:
    """The function that `path` names. An instance method is bound to an instance created without
    arguments.

    Raises LoadError, also for a class, and for anything the module raises on import.
    """
    function = load(path)
    if isinstance(function, type):
        raise LoadError(f"'{path}' is a class; name one of its methods or pass an instance")
    if not callable(function):
        raise LoadError(f"'{path}' cannot be called; name a function")
    return function


def load(path: str) -> object:
    """The object that `path` names: a function, a class, a constant. Raises LoadError as
    `load_function` does."""
    module_name, attributes = split_name(path)
    if not (module_name and attributes):
        raise LoadError(f"'{path}' names no function; write \"module:function\"")
    if is_pickled(path):
        return read_pickled(Path(module_name))

    owner: object = load_module(module_name)
    found = owner
    for name in attributes.split("."):
        owner = found
        found = getattr(found, name, None)
        if found is None:
            public = [other for other in dir(owner) if not other.startswith("_")]
            if isinstance(owner, ModuleType):
                kind = "the module"
            else:
                kind = f"'{getattr(owner, '__name__', owner)}'"
            raise LoadError(f"'{path}': {kind} has no '{name}'{hint(name, public)}")

    return _bound(owner, name, found, path)


def own_name(name: str) -> str:
    """The name for messages; for a function passed from Python, its own."""
    return split_name(name)[1] if is_pickled(name) else name


def is_pickled(name: str) -> bool:
    """Whether it names a function passed from Python, which every process reads from the run's
    folder."""
    return split_name(name)[0].endswith(PICKLED)


def read_pickled(file: Path) -> object:
    """The object pickled in a file after its first line. Raises LoadError if it cannot be
    unpickled, e.g. because a module is missing."""
    try:
        return _unpickled(file.read_bytes().partition(b"\n")[2])
    except Exception as error:  # unpickling runs user code
        raise LoadError(
            f"'{file}' cannot be read ({type(error).__name__}: {error}): pass the function again"
        ) from error


_unpickled = functools.cache(pickle.loads)  # once per content: functions are compared by identity


def split_name(path: str) -> tuple[str, str]:
    """The module (or file) and the attribute of a name; one of them is empty if the name is
    incomplete."""
    module_name, _, attributes = path.rpartition(":") if ":" in path else path.rpartition(".")
    return module_name, attributes


def load_module(name: str) -> ModuleType:
    """The module of that name or ".py" file, imported once. Raises LoadError for anything it
    raises."""
    with users_code(f"'{name}' cannot be imported:", passes=LoadError):
        try:
            if name.endswith(".py"):
                return _load_file(Path(name).expanduser())
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise LoadError(_not_found(name, error.name or name)) from error


@contextmanager
def users_code(what: str, passes: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turns an error of user code inside into a LoadError, which begins with `what` and names the
    line of that code. passes: errors that are raised unchanged."""
    try:
        yield
    except passes:
        raise
    except Exception as error:  # user code may raise anything
        place = f" (at {found})" if (found := users_place(error)) else ""
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise LoadError(f"{what} {kind}{error}{place}") from error


def check_server_packages(what: str, extra: str) -> None:
    """Raises UserError if the packages of an HTTP server are not installed. what: it needs them.
    extra: it has them."""
    try:
        importlib.import_module("starlette.applications"), importlib.import_module("uvicorn")
    except ImportError as error:
        raise UserError(
            f"{what} needs starlette and uvicorn ({error}): pip install 'distflow[{extra}]'"
        ) from None


def load_modules(names: Iterable[str]) -> None:
    """Import modules, which register their contents. Raises LoadError for the first that cannot be
    imported."""
    for name in names:
        load_module(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"there is no file '{path}'")
    return importlib.import_module(module_of(path.resolve()))


def _not_found(name: str, missing: str) -> str:
    if name != missing and not name.startswith(f"{missing}."):
        return f"'{name}' needs the module '{missing}', which is not installed: install its package"
    return f"there is no module '{missing}'"


def _bound(owner: object, name: str, found: object, path: str) -> object:
    if not (isinstance(owner, type) and inspect.isfunction(found)):
        return found
    if isinstance(inspect.getattr_static(owner, name), staticmethod):
        return found
    if required := required_parameters(owner):
        raise LoadError(
            f"'{path}' is a method, and {owner.__name__} needs {', '.join(required)} to be "
            "constructed; make it a static method, or pass the method of an instance"
        )

    return getattr(owner(), name)


def shown_name(fn: Callable[..., object]) -> str:
    """Where a user finds the function: module.name, or file.py:name."""
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None)
    if not (module and name):
        return repr(fn)

    file = file_of(module)
    if file is None:
        return f"{module}.{name}"
    return f"{file.name}:{name}"


def innermost(fn: Callable[..., object]) -> Callable[..., object]:
    """The function without any `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def is_ours(fn: Callable[..., object]) -> bool:
    """Whether the function, without any `functools.partial`, is defined in distflow."""
    module = str(getattr(innermost(fn), "__module__", ""))
    return module.startswith("distflow.") and file_of(module) is None


def is_async(fn: Callable[..., object]) -> TypeGuard[Callable[..., Awaitable[object]]]:
    """Whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def required_parameters(function: Callable[..., object]) -> list[str]:
    """The names of its parameters without a default. Raises ValueError if it has no signature."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def module_files(module: str) -> list[Path]:
    """Paths that a module may have, found without importing the packages above it."""
    stem = module.replace(".", "/")
    found: list[Path] = []
    for folder in sys.path:
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            found.append(Path(folder, name))
    return found


class SourceFile:
    """What a module defines, read from its text without running it. Raises SyntaxError or
    ValueError if it is not Python.

    names: everything bound at its top level. functions: its own functions, by name.
    """

    def __init__(self, text: bytes) -> None:
        tree = ast.parse(text)
        self.functions = {node.name: node for node in tree.body if isinstance(node, _FUNCTIONS)}
        self._classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.names = set(_bound_names(tree))

    @staticmethod
    def of(module: str) -> "SourceFile | None":
        """The source of a module; None if it cannot be read. Raises LoadError if there is certainly
        no such module.

        module: its name, or the path of its ".py" file.
        """
        files = [Path(module).expanduser()] if module.endswith(".py") else []

        files += module_files(module)
        file = next((file for file in files if file.is_file()), None)
        if module.endswith(".py") and file is None:
            raise LoadError(f"there is no file '{module}'")
        if file is None and "." not in module and importlib.util.find_spec(module) is None:
            raise LoadError(_not_found(module, module))

        try:
            if file is None:
                return None
            return SourceFile(read_file(file, max_bytes=MAX_SOURCE_BYTES))
        except (OSError, SyntaxError, ValueError):  # importing it reports more
            return None

    def defines(self, name: str) -> bool:
        """Whether it binds the name, or may: by a star import or `__getattr__`."""
        return not self.names.isdisjoint((name, "*", "__getattr__"))

    def signature(self, name: str) -> Callable[..., object] | None:
        """A dummy function with the parameters of the one of that name; None if a decorator may
        change them, or no plain function has the name. Every default is None."""
        node = self.functions.get(name)
        if node is None or node.decorator_list:
            return None

        function = eval(
            compile(
                ast.fix_missing_locations(ast.Expression(_without_values(node.args))), name, "eval"
            )
        )
        assert callable(function), "a lambda"

        return function

    def methods(self, name: str) -> set[str]:
        """The methods of the class of that name and of its bases in the file."""
        if (node := self._classes.get(name)) is None:
            return set()

        bases = (
            self.methods(base.id)
            for base in node.bases
            if isinstance(base, ast.Name) and base.id != name
        )
        return {own.name for own in node.body if isinstance(own, _FUNCTIONS)}.union(*bases)


def line_of(module: str, name: str) -> int | None:
    """The line of a function in the text of its module or file, if readable."""
    source = None if module.endswith(".pkl") else SourceFile.of(module)
    found = None if source is None else source.functions.get(name)
    return None if found is None else found.lineno


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _without_values(arguments: ast.arguments) -> ast.Lambda:
    everything = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for argument in filter(None, everything):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [value and ast.Constant(None) for value in arguments.kw_defaults]

    return ast.Lambda(arguments, ast.Constant(None))


def _bound_names(node: ast.AST) -> Iterator[str]:
    """The names that a module's own statements bind, even below `if` and `try`, and by `global` in
    functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield child.name
            for inner in ast.walk(child):
                if isinstance(inner, ast.Global):
                    yield from inner.names
            continue

        if isinstance(child, ast.alias):
            yield (child.asname or child.name).partition(".")[0]
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id

        yield from _bound_names(child)
