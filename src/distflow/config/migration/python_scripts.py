"""Settings of a Python script that trains with TRL, read from its syntax tree: nothing of it runs."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from distflow.config.migration.foreign_settings import ForeignSettings, Unread
from distflow.config.migration.shell_commands import calculate
from distflow.errors import UserError

METHODS = {"GRPO": "grpo", "RLOO": "grpo", "PPO": "ppo", "SFT": "sft", "Reward": "rm"}
"""What trains here as a trainer of TRL does: `GRPOTrainer`, and its `GRPOConfig`."""
_CLASS = re.compile(r"(\w+?)(V2)?(Trainer|Config)")
_PARSERS = ("TrlParser", "HfArgumentParser")
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_WITHOUT_EFFECT = ("args", "config", "bias", "task_type", "inference_mode", "optimizers", "data_collator")
_OBJECTS = ("processing_class", "tokenizer", "peft_config", "model_init_kwargs", "ref_model", "quantization_config")
"""Arguments that hold what the script made; what was told of the model and its adapters is known from where it was."""
_SHOWN = 60
_REWARDS = "my_rewards.py"


@dataclass(frozen=True)
class Rows:
    """A data set as `data.train_files` names it. changes: the calls that change its rows, with their lines."""

    source: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Function:
    name: str
    module: str = ""


def read_script(text: str, arguments: Mapping[str, object]) -> ForeignSettings:
    """arguments: of the command that runs it. Raises UserError where the script trains nothing that trains here."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"it is no Python script: {error}") from error
    script = _Script(arguments)
    try:
        script.visit(tree)
    except RecursionError as error:
        raise UserError("its expressions are nested too deep") from error
    return script.settings()


class _Script(ast.NodeVisitor):
    """names: values of variables, functions and, with `()`, of what a function returns. fields: of any object, the
    script's arguments above all. given: (class, key, value, line) of the arguments of configs and trainers."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        self.arguments = arguments
        self.names: dict[str, object] = {}
        self.lines: dict[str, int] = {}
        self.fields: dict[str, object] = dict(arguments)
        self.given: list[tuple[str, str, object, int]] = []
        self.kinds: dict[str, str] = {}
        self.configs: dict[str, str] = {}
        self.trainers: list[tuple[str, int]] = []
        self.remarks: list[str] = []
        self.depth = 0
        self.has_parser = False
        self.function = ""

    def settings(self) -> ForeignSettings:
        if not self.trainers:
            raise UserError("it calls no trainer of TRL (GRPOTrainer, SFTTrainer, ...), so that it trains nothing known")
        kind, line = self.trainers[-1]
        if kind not in METHODS:
            known = ", ".join(f"{name}Trainer" for name in METHODS)
            raise UserError(f"line {line}: {kind}Trainer trains by a method that is not there; {known} have a counterpart")
        found = ForeignSettings("TRL", METHODS[kind], remarks=self.remarks)
        if kind == "RLOO":
            found.add("algorithm.adv_estimator", "rloo", line)
        if len({name for name, _ in self.trainers}) > 1:
            found.remarks.append(f"the script calls several trainers; the last, {kind}Trainer in line {line}, is taken")
        for owner, key, value, at in self.given:
            if owner in (kind, "") and not (key in _OBJECTS and not isinstance(value, str | dict)):
                found.add(*_as_setting(key, value, found.remarks), at)
        for key, value in self.arguments.items() if self.has_parser else ():
            found.add(key, value, 0)
        return found

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, self.value(node.value), node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._assign(node.target, self.value(node.value), node.value)

    def _assign(self, target: ast.expr, value: object, source: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            values = value if isinstance(value, list) else [value]
            for each, part in zip(target.elts, values, strict=False):
                self._assign(each, part, source)
        elif isinstance(target, ast.Name):
            before = self.names.get(target.id, value)
            if self.depth and before != value:
                value = Unread(f"it is set in line {self.lines[target.id]} and in a branch in line {target.lineno}")
            self.names[target.id], self.lines[target.id] = value, target.lineno
            if isinstance(source, ast.Call) and (kind := self._kind(_name(source.func), "Config")) is not None:
                self.configs[target.id] = kind
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.fields[target.attr] = value
            if target.value.id in self.configs:
                self.given.append((self.configs[target.value.id], target.attr, value, target.lineno))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.function = self.function, node.name
        self.names[node.name] = Function(node.name)
        arguments = [*node.args.posonlyargs, *node.args.args]
        defaults = zip(reversed(arguments), reversed(node.args.defaults), strict=False)
        for argument, default in [*defaults, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
            if default is not None:
                self.names.setdefault(argument.arg, self.value(default))
        self.generic_visit(node)
        self.function = outer

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self.names[f"{self.function}()"] = self.value(node.value)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = Function(alias.name, node.module or "")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [kind for base in node.bases if (kind := self._kind(_name(base), "Trainer")) is not None]
        if bases:
            self.kinds[node.name] = bases[0]
            self.remarks.append(f"line {node.lineno}: {node.name} changes what TRL's trainer does")
        for item in node.body:
            if isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None:
                for target in item.targets if isinstance(item, ast.Assign) else [item.target]:
                    if isinstance(target, ast.Name):
                        self.fields.setdefault(target.id, self.value(item.value))
            else:
                self.visit(item)

    def visit_If(self, node: ast.If) -> None:
        inside = "__name__" not in ast.unparse(node.test)
        self.depth += inside
        self.generic_visit(node)
        self.depth -= inside

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _name(node.func)
        named = {each.arg: each.value for each in node.keywords if each.arg is not None}
        self.has_parser = self.has_parser or name in _PARSERS
        if name == "add_argument":
            words = [self.value(word) for word in node.args]
            option = next((word for word in reversed(words) if isinstance(word, str) and word.startswith("--")), "")
            otherwise = False if "store_true" in ast.unparse(node) else Unread(f"{option} has no default")
            default = self.value(named["default"]) if "default" in named else otherwise
            self.fields.setdefault(option.lstrip("-").replace("-", "_"), default)
        elif (kind := self._kind(name, "Trainer")) is not None:
            self.trainers.append((kind, node.lineno))
            named |= dict(zip(("model", "reward_funcs") if kind in ("GRPO", "RLOO") else ("model",), node.args, strict=False))
            self._give(kind, named, node)
        elif (kind := self._kind(name, "Config")) is not None:
            self._give(kind, named, node)
        elif name in ("LoraConfig", "get_peft_model"):
            self._give("", {_LORA.get(key, key): value for key, value in named.items() if key != "model"}, node)
        elif name == "from_pretrained" and "Tokenizer" not in (owner := ast.unparse(node.func)):
            if any(part in owner for part in ("CausalLM", "FastLanguageModel", "FastModel", "ValueHead")):
                skipped = ("model_name", "pretrained_model_name_or_path", "device_map", "quantization_config")
                self._give("", {key: value for key, value in named.items() if key not in skipped}, node)

    def _kind(self, name: str, role: str) -> str | None:
        """GRPO for GRPOTrainer and GRPOConfig; "" for arguments of any trainer. None for another class."""
        found = _CLASS.fullmatch(name)
        if role == "Config" and name == "TrainingArguments":
            return ""
        if name in self.kinds and role == "Trainer":
            return self.kinds[name]
        if found is None or found[3] != role or (role == "Config" and found[1] not in METHODS):
            return None
        imported = self.names.get(name)
        is_trl = isinstance(imported, Function) and imported.module.startswith("trl")
        return found[1] if found[1] in METHODS or is_trl else None

    def _give(self, owner: str, named: Mapping[str, ast.expr], node: ast.Call) -> None:
        values = {key: self.value(value) for key, value in named.items()}
        for each in node.keywords:
            if each.arg is None:
                more = self.value(each.value)
                if isinstance(more, dict):
                    values |= more
                elif not isinstance(each.value, ast.Name) or each.value.id not in ("kwargs", "model_kwargs"):
                    self.remarks.append(f"line {node.lineno}: **{ast.unparse(each.value)} cannot be read")
        for key, value in values.items():
            if key not in _WITHOUT_EFFECT:
                self.given.append((owner, key, value, getattr(named.get(key), "lineno", node.lineno)))
                self.fields[key] = value

    def value(self, node: ast.expr) -> object:
        """What an expression stands for; `Unread` where that takes more than literals, names and load_dataset."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names.get(node.id, Unread(f"`{node.id}` has no value in the file"))
            case ast.List() | ast.Tuple():
                values = [self.value(each) for each in node.elts]
                return next((each for each in values if isinstance(each, Unread)), values)
            case ast.Dict():
                keys = [each.value if isinstance(each, ast.Constant) else None for each in node.keys]
                return {key: self.value(each) for key, each in zip(keys, node.values, strict=True) if key is not None}
            case ast.UnaryOp(op=ast.USub()) if isinstance(number := self.value(node.operand), int | float):
                return -number
            case ast.JoinedStr():
                return self._text(node)
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.Attribute():
                return self.fields.get(node.attr, _computed(node))
            case ast.Subscript():
                return self._item(self.value(node.value), self.value(node.slice), node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                left, right = (self.value(each) for each in (node.left, node.right))
                if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
                    return left + right
                try:
                    return calculate(node, self.value)
                except ValueError:
                    return _computed(node)
        return _computed(node)

    def _text(self, node: ast.JoinedStr) -> object:
        parts = [self.value(each.value if isinstance(each, ast.FormattedValue) else each) for each in node.values]
        if not all(isinstance(part, str | int | float) for part in parts):
            return _computed(node)
        return "".join(map(str, parts))

    def _item(self, value: object, name: object, node: ast.Subscript) -> object:
        if isinstance(value, Rows) and isinstance(name, str):
            path, *config = value.source.split(":")
            return value if len(config) > 1 else replace(value, source=f"{path}:{config[0] if config else ''}:{name}")
        if isinstance(value, dict | list):
            try:
                return cast(dict[object, object], value)[name]
            except (LookupError, TypeError):
                pass
        return _computed(node)

    def _call(self, node: ast.Call) -> object:
        name = _name(node.func)
        named = {each.arg: self.value(each.value) for each in node.keywords if each.arg is not None}
        values = [self.value(each) for each in node.args]
        if name == "load_dataset":
            return _rows(values, named)
        if name in ("getenv", "get") and len(values) == 2:
            return values[1]
        if name == "dict" and not values:
            return named
        if name == "field":
            return named.get("default", _computed(node))
        if name == "from_pretrained":
            return [*values, *(named.get(key) for key in ("model_name", "pretrained_model_name_or_path"))][0] or named.get(
                "pretrained_model_name_or_path", _computed(node)
            )
        if name in ("int", "float", "str", "Path", "get_peft_model", "prepare_model_for_kbit_training") and values:
            return values[0]
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        returned = self.names.get(f"{name}()") if isinstance(node.func, ast.Name) else None
        if isinstance(returned, Rows):
            return returned
        rows = next((each for each in (owner, *values, returned) if isinstance(each, Rows)), None)
        if rows is not None:
            return replace(rows, changes=(*rows.changes, f"{name} in line {node.lineno}"))
        return returned if returned is not None else _computed(node)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _as_setting(key: str, value: object, remarks: list[str]) -> tuple[str, object]:
    """Data and rewards as the config names them."""
    if isinstance(value, Rows):
        remarks += [f"{key}: the script changes the rows ({change}): change the file likewise" for change in value.changes]
        return key, value.source
    if key != "reward_funcs" or isinstance(value, Unread):
        return key, value
    parts = [_as_reward(each, remarks) for each in (value if isinstance(value, list) else [value])]
    return "reward.functions", {"default": parts}


def _as_reward(value: object, remarks: list[str]) -> object:
    if isinstance(value, str):
        return {"name": "model", "options": {"path": value}}
    if not isinstance(value, Function):
        remarks.append(f"reward_funcs: {value} is no function of the file")
        return "math"
    if value.name == "accuracy_reward" and value.module.startswith("trl"):
        return "math"
    remarks.append(f"reward_funcs: put {value.name} into {_REWARDS}, with the parameters that docs/rewards.md has")
    return f"{_REWARDS}:{value.name}"


def _computed(node: ast.expr) -> Unread:
    text = ast.unparse(node)
    return Unread(f"it is computed: {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}")


def _rows(values: list[object], named: Mapping[str, object]) -> object:
    """The source that load_dataset's arguments name; a list of them for a list of splits."""
    path = values[0] if values else named.get("path")
    config = values[1] if len(values) > 1 else named.get("name")
    split, files = named.get("split"), named.get("data_files")
    if files is not None and path in ("json", "csv", "parquet", "text"):
        files = files.get("train") if isinstance(files, dict) else files
        return Rows(files) if isinstance(files, str) else Unread("its data_files are not one file")
    if not isinstance(path, str):
        return path if isinstance(path, Unread) else Unread("its data set has no name")
    if isinstance(split, list):
        return [_rows([path, config], {"split": each}) for each in split]
    part, bracket, share = str(split or "").partition("[")
    changes = (f"the split {split}: data.train_max_samples takes the first rows",) if bracket and share else ()
    config = config if isinstance(config, str) else ""
    return Rows(f"{path}:{config}:{part}" if part else f"{path}:{config}" if config else path, changes)
