"""Evaluates a Python script from its syntax tree, without running it: what its variables, functions, classes and
options stand for."""

import ast
import json
import operator
import posixpath
from abc import ABC, abstractmethod
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, cast

from distflow.commands.migration.yaml_and_shell import Unread, calculate

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}
_OF_TEXTS = (
    *("split", "rsplit", "replace", "lower", "upper", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"),
)
_TESTS: dict[type[ast.cmpop], Callable[[Any, Any], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le},
    ast.In: lambda part, whole: part in whole if isinstance(whole, list | dict) else str(part) in str(whole),
    ast.NotIn: lambda part, whole: part not in whole if isinstance(whole, list | dict) else str(part) not in str(whole),
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
NOT_GIVEN = Unread("")
"""An option of the command that it does not give: TRL's default."""
_IN_TURN = Unread("it has a different value in each turn of a loop")
_MOST_CALLS, _DEEPEST, _LONGEST, _MOST_ITEMS = 500, 12, 60, 100_000
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Rows:
    """A data set as `data.train_files` names it. changes: the calls that change its rows, with their lines."""

    source: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Object:
    """A function or class that the script defines or imports, or an object of the class. made: its place among the
    configs of trainers that the script makes. owner: whose attributes it has; a config has its own."""

    name: str
    module: str = ""
    made: int = -1

    @property
    def owner(self) -> str:
        return self.name if self.made < 0 else f"{self.name} {self.made}"


class Script(ABC):
    """names: values of variables, in the function that is being read. attributes: by class and name; without a class,
    of any object. functions: by name, methods as `Class.name`. configs: (trainer, line) of each that is made. given:
    (trainer, key, value, line, config) of arguments. decided: (names, remark) of choices that options of the script, or
    fields of its classes, decide. copied: the options in what a variable is set to. has_options: its arguments are
    those of TRL. has_adapters: a trainer or a model is given some."""

    def __init__(self, arguments: Mapping[str, object], devices: int | None) -> None:
        self.environment = {"WORLD_SIZE": str(devices or 1)}
        self.arguments, self.names = arguments, cast(MutableMapping[str, object], {})
        self.attributes: dict[tuple[str, str], object] = {}
        self.functions: dict[str, Function] = {}
        self.returned: dict[str, object] = {}
        self.num_calls, self.active = Counter[str](), list[str]()
        self.given: list[tuple[str, str, object, int, int]] = []
        self.trainers: list[tuple[str, int, int]] = []
        self.configs: list[tuple[str, int]] = []
        self.options, self.fields = set[str](), set[str]()
        self.decided: list[tuple[set[str], str]] = []
        self.remarks: list[str] = []
        self.lines: dict[str, int] = {}
        self.copied: dict[str, set[str]] = {}
        self.has_options = self.has_adapters = self.in_branch = self.in_loop = self.has_mapping = False

    def read_file(self, tree: ast.Module) -> None:
        """The module, and then the functions that nothing in it has called. Options may be read above their parser."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node.func) == "add_argument":
                self._call(node, "add_argument")
        self.read(tree.body)
        for name in [name for name in self.functions if not self.num_calls[name]]:
            self._enter(name, {}, self.names)

    def read(self, body: Iterable[ast.AST]) -> None:
        """Statements in their order; those of functions where these are called."""
        for node in body:
            match node:
                case ast.Assign():
                    value = self.value(node.value)
                    for target in node.targets:
                        self._assign(target, value)
                        self.copied[name_of(target)] = self._options_in(node.value)
                case ast.AnnAssign(value=ast.expr() as assigned):
                    self._assign(node.target, self.value(assigned))
                case ast.AugAssign():
                    changed = self.value(ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))
                    self._assign(node.target, Unread("it is changed in a loop") if self.in_loop else changed)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.names[node.name], self.functions[node.name] = Object(node.name), node
                case ast.Return(value=ast.expr() as returned) if self.active:
                    self.returned[self.active[-1]] = self.value(returned)
                case ast.For() | ast.While():
                    each = self.value(node.iter) if isinstance(node, ast.For) else None
                    first = each[0] if isinstance(each, list) and len(each) == 1 else _IN_TURN
                    if isinstance(node, ast.For):
                        self._assign(node.target, first)
                    outer, self.in_loop = self.in_loop, self.in_loop or first is _IN_TURN
                    self.read([*node.body, *node.orelse])
                    self.in_loop = outer
                case ast.ImportFrom():
                    for alias in node.names:
                        self.names[alias.asname or alias.name] = Object(alias.name, node.module or "")
                case ast.ClassDef():
                    self._define_class(node)
                case ast.If():
                    holds = self.value(node.test)
                    unknown = isinstance(holds, Unread) and "__name__" not in ast.unparse(node.test)
                    if any(map(self._changes, node.orelse if holds else node.body)):
                        self._decide(node.test, holds)
                    outer, self.in_branch = self.in_branch, self.in_branch or unknown
                    self.read([*(node.body if holds else ()), *(node.orelse if unknown or not holds else ())])
                    self.in_branch = outer
                case ast.Delete():
                    for target in node.targets:
                        if isinstance(target, ast.Subscript) and isinstance(owner := self.value(target.value), dict):
                            self._remove(owner, self.value(target.slice))
                case ast.expr():
                    self.value(node)
                case _:
                    self.read(ast.iter_child_nodes(node))

    def _decide(self, test: ast.expr, holds: object) -> None:
        names = self._options_in(test)
        if not isinstance(holds, Unread):
            what = f"line {test.lineno}: `{_shown(test)}` is {bool(holds)}"
            self.decided.append((names, f"{what} by the defaults of the script's options; the other case is left out"))

    def _options_in(self, node: ast.expr) -> set[str]:
        """Names of options that an expression may read: those of attributes, and of variables that are copies."""
        parts = [*ast.walk(node)]
        copies = (self.copied.get(part.id, set()) for part in parts if isinstance(part, ast.Name))
        return {part.attr for part in parts if isinstance(part, ast.Attribute)}.union(*copies)

    def _put(self, owner: dict[str, object], given: Mapping[str, object]) -> None:
        """New entries of a mapping."""
        for key, value in given.items():
            is_unsure = self.in_branch and owner.get(key, NOT_GIVEN) != value
            owner[key] = Unread("it has a different value in a branch") if is_unsure else value

    def _remove(self, owner: dict[str, object], key: object) -> None:
        if self.in_branch and key in owner:
            owner[str(key)] = Unread("it is removed in a branch")
        owner.pop(str(key), None) if not self.in_branch else None

    def _assign(self, target: ast.expr, value: object) -> None:
        if isinstance(target, ast.Tuple):
            for each, part in zip(target.elts, value if isinstance(value, list) else [value], strict=False):
                self._assign(each, part)
        elif isinstance(target, ast.Name):
            before = self.names.get(target.id)
            if self.in_branch and before is not None and before != value and not isinstance(value, Rows):
                value = before if isinstance(value, Unread) else Unread("it has a different value in a branch")
            self.names[target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            owner = self.names.get(target.value.id)
            self.set_attributes(owner, {target.attr: value})
            if isinstance(owner, Object) and (kind := self.kind_of(owner.name, "Config")) is not None:
                self.lines[target.attr] = target.lineno
                self.give(kind, {target.attr: value}, target.lineno, owner.made)
        elif isinstance(target, ast.Subscript) and isinstance(owner := self.value(target.value), dict):
            self.lines[str(key := self.value(target.slice))] = target.lineno
            self._put(owner, {str(key): value})

    def set_attributes(self, owner: object, values: Mapping[str, object]) -> None:
        names = {"", owner.owner} if isinstance(owner, Object) else {""}
        self.attributes |= {(name, key): value for name in names for key, value in values.items()}

    def _enter(self, name: str, given: Mapping[str, object], around: Mapping[str, object]) -> object:
        """Read a function with these arguments; others have their defaults, or what their names stand for around it.
        Returns what it returns."""
        self.num_calls[name] += 1
        if name in self.active or len(self.active) >= _DEEPEST or self.num_calls.total() > _MOST_CALLS:
            return Unread(f"it is what {name} returns")
        node, outer = self.functions[name], self.names
        values: dict[str, object] = {}
        for argument, default in _parameters(node):
            kind = self.names.get(name_of(argument.annotation)) if argument.annotation is not None else None
            unknown = Unread(f"`{argument.arg}` is an argument that the file does not give")
            otherwise = around.get(argument.arg, kind if isinstance(kind, Object) else unknown)
            values[argument.arg] = otherwise if default is None else self.value(default)
        self.names = ChainMap(values | dict(given), cast(dict[str, object], outer))
        self.active.append(name)
        self.returned.pop(name, None)
        self.read(node.body)
        self.active.pop()
        self.names = outer
        return self.returned.get(name, Unread(f"it is what {name} returns"))

    def _define_class(self, node: ast.ClassDef) -> None:
        """Fields of a class hold the defaults of a script's own arguments; a class of a trainer is that trainer."""
        kinds = [kind for base in node.bases if (kind := self.kind_of(name_of(base), "Trainer")) is not None]
        self.names[node.name] = Object(f"{kinds[0]}Trainer", "trl") if kinds else Object(node.name)
        self.remarks += [f"line {node.lineno}: {node.name} changes what {kinds[0]}Trainer does"] if kinds else []
        for item in node.body:
            if isinstance(item, Function):
                self.functions[f"{node.name}.{item.name}"] = item
            target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
            if isinstance(item, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
                unknown = Unread(f"`{node.name}.{target.id}` has no value in the file")
                value = self.arguments.get(target.id, unknown if item.value is None else self.value(item.value))
                self.attributes[node.name, target.id] = value
                self.fields.add(target.id)
                if item.value is not None and self.attributes.setdefault(("", target.id), value) != value:
                    self.attributes["", target.id] = Unread(f"several classes have a field `{target.id}`")

    def _changes(self, node: ast.AST) -> bool:
        """Whether a statement may change a setting."""
        calls = {name_of(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
        is_made = any(self.kind_of(name, role) is not None for name in calls for role in ("Config", "Trainer"))
        changes = any(isinstance(part, ast.Assign | ast.AugAssign | ast.Return) for part in ast.walk(node))
        return is_made or changes or not calls.isdisjoint(("update", "append", "setdefault"))

    @abstractmethod
    def call_of_library(
        self, node: ast.Call, name: str, owner: object, values: list[object], named: Mapping[str, object]
    ) -> list[object]:
        """What a function of the library that the script uses returns; empty for others."""

    @abstractmethod
    def kind_of(self, name: str, role: str) -> str | None:
        """What is trained by a class with this role, Trainer or Config; None for another class."""

    @abstractmethod
    def give(self, owner: str, values: Mapping[str, object], line: int, config: int = -1) -> None:
        """Take down arguments of a trainer, a config or a model."""

    def value(self, node: ast.expr) -> object:
        """What an expression stands for; `Unread` where that takes more than literals, names and load_dataset."""
        found = self._value(node)
        return Unread("it is too long") if isinstance(found, str | list) and len(found) > _MOST_ITEMS else found

    def _value(self, node: ast.expr) -> object:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names.get(node.id, Unread(f"`{node.id}` has no value in the file"))
            case ast.List() | ast.Tuple():
                return [self.value(each) for each in node.elts]
            case ast.Dict():
                return self._mapping(node)
            case ast.ListComp(generators=[ast.comprehension(target=ast.Name(), ifs=[])]):
                return self._each(node)
            case ast.UnaryOp(op=ast.USub()) if isinstance(number := self.value(node.operand), int | float):
                return -number
            case ast.UnaryOp(op=ast.Not()):
                holds = self.value(node.operand)
                return _computed(node) if isinstance(holds, Unread) else not holds
            case ast.BoolOp():
                return self._either(node)
            case ast.JoinedStr():
                parts = [self.value(each) for each in node.values]
                is_known = all(isinstance(part, str | int | float) for part in parts)
                return "".join(map(str, parts)) if is_known else _computed(node)
            case ast.FormattedValue():
                return self.value(node.value)
            case ast.Attribute():
                return node.attr if name_of(node.value) == "torch" else self._attribute(node)
            case ast.Subscript() if ast.unparse(node.value) == "os.environ":
                return self.environment.get(str(self.value(node.slice)), _computed(node))
            case ast.Subscript():
                return self._item(self.value(node.value), self.value(node.slice), node)
            case ast.Compare(ops=[test]) if type(test) in _TESTS:
                pair = [self.value(each) for each in (node.left, node.comparators[0])]
                unknown = any(isinstance(each, Unread | Rows) for each in pair)
                return _computed(node) if unknown else _converted(lambda both: _TESTS[type(test)](*both), pair)
            case ast.IfExp():
                holds, either, otherwise = (self.value(each) for each in (node.test, node.body, node.orelse))
                holds = False if self._is_left_out(holds) else holds
                known = isinstance(holds, bool) or otherwise is None
                self._decide(node.test, holds)
                if isinstance(holds, Unread) and "Config(" in ast.unparse(node.body):
                    self.remarks.append(f"line {node.lineno}: it is taken that `{_shown(node.test)}`")
                return (otherwise if holds is False else either) if known else _computed(node)
            case ast.Call():
                return self._call(node, name_of(node.func))
            case ast.BinOp():
                left, right = self.value(node.left), self.value(node.right)
                if isinstance(node.op, ast.Add) and isinstance(left, str | list) and type(left) is type(right):
                    return operator.add(left, right)
                if isinstance(node.op, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
                    return left | right
                try:
                    return calculate(node, lambda part: left if part is node.left else right)
                except ValueError:
                    return _computed(node)
        return _computed(node)

    def _each(self, node: ast.ListComp) -> object:
        """The list of a comprehension over the parts of a list."""
        parts, outer = self.value(node.generators[0].iter), self.names
        if not isinstance(parts, list):
            return _computed(node)
        found = []
        for part in parts:
            self.names = ChainMap({name_of(node.generators[0].target): part}, cast(dict[str, object], outer))
            found.append(self.value(node.elt))
        self.names = outer
        return found

    def _either(self, node: ast.BoolOp) -> object:
        """The first part that decides an `and` or an `or`."""
        value: object = None
        for part in node.values:
            value = self.value(part)
            value = None if self._is_left_out(value) else value
            if isinstance(value, Unread | Object | Rows):
                return _computed(node)
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value

    def _is_left_out(self, value: object) -> bool:
        """Whether it is an option that the command of the script does not give: nothing, where its truth is asked."""
        return value == NOT_GIVEN and bool(self.arguments)

    def _mapping(self, node: ast.Dict) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, each in zip(node.keys, node.values, strict=True):
            value = self.value(each)
            if isinstance(key, ast.Constant):
                found[str(key.value)], self.lines[str(key.value)] = value, each.lineno
            elif key is None and isinstance(value, dict):
                found |= value
            else:
                self.remarks.append(f"line {each.lineno}: its entries cannot be read: {_shown(each)}")
        return found

    def _attribute(self, node: ast.Attribute) -> object:
        owner = self.value(node.value) if isinstance(node.value, ast.Name | ast.Attribute) else None
        own = (owner.owner, node.attr) if isinstance(owner, Object) else ("", "")
        if own in self.attributes or node.attr in self.arguments:
            return self.attributes.get(own, self.arguments.get(node.attr))
        unknown = NOT_GIVEN if self.has_options else Unread(f"`{_shown(node)}` has no value in the file")
        return self.attributes.get(("", node.attr), unknown)

    def _item(self, value: object, name: object, node: ast.Subscript) -> object:
        """An entry of a mapping, or a split of a data set."""
        if isinstance(value, Rows):
            path, *config = value.source.split(":")
            if any(change.startswith("train_test_split") for change in value.changes) and name == "test":
                return Unread(f"it is a part of the training rows ({value.changes[-1]}); write it to a file")
            is_named = isinstance(name, str) and len(config) < 2
            return replace(value, source=f"{path}:{config[0] if config else ''}:{name}") if is_named else value
        if isinstance(value, list) and type(name) is int and -len(value) <= name < len(value):
            return value[name]
        return (
            value.get(name, _computed(node)) if isinstance(value, dict) and isinstance(name, str) else _computed(node)
        )

    def _call(self, node: ast.Call, name: str) -> object:
        """What it returns."""
        named, values = self._arguments(node), [self.value(each) for each in node.args]
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if found := self.call_of_library(node, name, owner, values, named):
            return found[0]
        if known := self._of_a_mapping_or_a_text(node, name, owner, values, named):
            return known[0]
        if name in ("from_pretrained", *_TYPES, "get_peft_model", "prepare_model_for_kbit_training"):
            paths = (named.get("model_name"), named.get("pretrained_model_name_or_path"), _computed(node))
            return next(each for each in (*values[:1], *paths) if each is not None)
        returned = self._returned(node, name, owner, values, named)
        rows = next((each for each in (owner, *values) if isinstance(each, Rows)), None)
        if isinstance(owner, str) and name in ("to", "cuda"):
            return owner
        if returned is not None and not (rows and isinstance(returned, Rows | Unread)):
            return returned
        return replace(rows, changes=(*rows.changes, f"{name} in line {node.lineno}")) if rows else _computed(node)

    def _of_a_mapping_or_a_text(
        self, node: ast.Call, name: str, owner: object, values: list[object], named: Mapping[str, object]
    ) -> list[object]:
        """What a well-known function returns; empty for others."""
        if name == "loads" and values and isinstance(values[0], str):
            return [_converted(json.loads, values[0])]
        if name == "dict" and all(isinstance(each, dict) for each in values):
            return [dict(ChainMap(dict(named), *(each for each in values if isinstance(each, dict))))]
        if name in ("update", "copy") and isinstance(owner, dict):
            for each in [*values, named] if name == "update" else ():
                self._put(owner, each if isinstance(each, dict) else {})
            if not all(isinstance(each, dict) for each in values):
                self.remarks.append(f"line {node.lineno}: its other arguments cannot be read")
            return [owner if name == "update" else dict(owner)]
        if name in ("append", "extend") and isinstance(owner, list) and values:
            new = values[0] if name == "extend" else [values[0]]
            is_known = isinstance(new, list) and not self.in_branch and not self.in_loop
            owner += new if isinstance(new, list) and is_known else [_computed(node)]
            return [owner]
        if name == "getattr" and len(values) > 1 and name_of(node.args[0]) == "torch":
            return [values[1]]
        if name in ("get", "pop", "setdefault") and isinstance(owner, dict) and values and isinstance(values[0], str):
            found = owner.get(values[0], values[1] if len(values) == 2 else None)
            if name == "pop":
                self._remove(owner, values[0])
            elif name == "setdefault":
                self._put(owner, {values[0]: found})
            return [found]
        if name in ("getenv", "field") or name == "get" and ast.unparse(node.func).endswith("environ.get"):
            made = (each.value for each in node.keywords if each.arg == "default_factory")
            lists = [self.value(each.body) for each in made if isinstance(each, ast.Lambda)]
            default = values[1] if len(values) == 2 else named.get("default", _computed(node))
            return lists or [self.environment.get(str(values[0]) if values else "", default)]
        if name in _TYPES and len(values) == 1 and isinstance(values[0], str | int | float):
            return [_converted(_TYPES[name], values[0])]
        if isinstance(owner, str) and name in _OF_TEXTS and not named:
            return [_converted(lambda arguments: getattr(owner, name)(*arguments), values)]
        if ast.unparse(node.func) == "os.path.join" and all(isinstance(each, str) for each in values):
            return [_converted(lambda parts: posixpath.join(*parts), values)]
        return []

    def required(self, function: str) -> set[str]:
        """The parameters without a default of a function of the script."""
        node = self.functions.get(function)
        return set() if node is None else {argument.arg for argument, default in _parameters(node) if default is None}

    def _returned(
        self, node: ast.Call, name: str, owner: object, values: list[object], named: Mapping[str, object]
    ) -> object:
        """Of a function, a method or a class of the script, which is read with these arguments; None for others."""
        known = self.names.get(name) if isinstance(node.func, ast.Name) else None
        is_class = any(of == name for of, _ in self.attributes) or f"{name}.__init__" in self.functions
        maker = Object(name) if is_class and isinstance(known, Object) else owner
        function = name if isinstance(known, Object) else ""
        if isinstance(maker, Object):
            function = f"{maker.name}.{'__init__' if maker is not owner else name}"
            values = [maker, *values]
        returned: object = None
        if function in self.functions:
            places = [argument.arg for argument, _ in _parameters(self.functions[function])]
            given = dict(zip(places, values, strict=False)) | dict(named)
            returned = self._enter(function, {key: given[key] for key in places if key in given}, {})
        if maker is owner:
            return returned
        self.set_attributes(maker, named)
        return maker

    def _arguments(self, node: ast.Call) -> dict[str, object]:
        """By name, those of `**` too."""
        found, name = dict[str, object](), name_of(node.func)
        for each in node.keywords:
            value = self.value(each.value)
            if each.arg is not None:
                found[each.arg], self.lines[each.arg] = value, each.value.lineno
            elif isinstance(value, dict):
                found |= value
            elif value != NOT_GIVEN and (
                self.kind_of(name, "Config") is not None or name in ("dict", "update", "LoraConfig")
            ):
                self.remarks.append(f"line {node.lineno}: its other arguments cannot be read")
        return found


def _parameters(node: Function) -> list[tuple[ast.arg, ast.expr | None]]:
    """Each with its default."""
    places = [*node.args.posonlyargs, *node.args.args]
    defaults = [*[None] * (len(places) - len(node.args.defaults)), *node.args.defaults]
    return [*zip(places, defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _shown(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _computed(node: ast.expr) -> Unread:
    return Unread(f"it is computed: {_shown(node)}")


def _converted(convert: Callable[[Any], object], value: object) -> object:
    try:
        return convert(value)
    except (ValueError, TypeError, RecursionError) as error:
        return Unread(f"it cannot be read: {error}")
