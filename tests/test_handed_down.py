"""A parameter that many functions hand on without using it belongs into a record, or is read where it is needed."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.source_trees import modules, nodes_of

MOST_FUNCTIONS = 4
MOST_PARAMETERS = 12
REASONS = {
    "reduce": "how ranks are added up: known to the engine alone, wanted by the means deepest in the formulas",
}
"""The parameters that more than four functions in a row hand on, and why."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Parameter = tuple[Path, Function, str]


def names_of(function: Function) -> list[str]:
    a = function.args
    return [parameter.arg for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


@cache
def functions() -> dict[str, list[tuple[Path, Function]]]:
    """The functions of the package by the name that calls them: a class's name for its `__init__`."""
    found: dict[str, list[tuple[Path, Function]]] = defaultdict(list)
    for path in modules().values():
        for node in nodes_of(path):
            if isinstance(node, Function) and node.name != "__init__":
                found[node.name].append((path, node))
            elif isinstance(node, ast.ClassDef):
                found[node.name] += [(path, n) for n in node.body if isinstance(n, Function) and n.name == "__init__"]
    return found


def is_method(function: Function) -> bool:
    return names_of(function)[:1] in (["self"], ["cls"]) and function.name != "__init__"


def handed(call: ast.Call, name: str, path: Path) -> Iterator[Parameter]:
    """The parameter of the package's function that this call sets to the variable `name`, where one can tell which."""
    of_object = isinstance(call.func, ast.Attribute)
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    candidates = [callee for callee in functions().get(called, []) if is_method(callee[1]) == of_object]
    here = [callee for callee in candidates if callee[0] == path] or candidates
    if len(here) == 1:
        own = [parameter for parameter in names_of(here[0][1]) if parameter not in ("self", "cls")]
        arguments = [*zip(own, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
        for parameter, argument in arguments:
            if isinstance(argument, ast.Name) and argument.id == name and parameter in own:
                yield *here[0], parameter


@cache
def variables_and_calls(function: Function) -> tuple[Counter[str], list[ast.Call]]:
    nodes = list(ast.walk(function))
    return Counter(n.id for n in nodes if isinstance(n, ast.Name)), [n for n in nodes if isinstance(n, ast.Call)]


@cache
def next_of(parameter: Parameter) -> tuple[Parameter, ...]:
    """Where a function hands its parameter on, if it does nothing else with it."""
    path, function, name = parameter
    uses, calls = variables_and_calls(function)
    to = [callee for call in calls for callee in handed(call, name, path)]
    return tuple(to) if len(to) == uses[name] else ()


def longest(parameter: Parameter, above: tuple[Parameter, ...] = ()) -> tuple[Parameter, ...]:
    """The longest row of functions that hand the parameter on, each to the next."""
    if parameter in above or not next_of(parameter):
        return ()
    return parameter, *max((longest(each, (*above, parameter)) for each in next_of(parameter)), key=len)


def test_few_parameters_are_handed_down_through_many_functions() -> None:
    rows = [longest((*each, name)) for some in functions().values() for each in some for name in names_of(each[1])]
    found = {row[-1][2]: [function.name for _, function, _ in row] for row in rows if len(row) > MOST_FUNCTIONS}
    assert set(found) == set(REASONS), found
    assert len(REASONS) <= MOST_PARAMETERS
