"""Settings of a Python script that trains with TRL: the literal arguments of its config and its
trainer.

The script is parsed and never evaluated. An argument that is no literal is marked as unread, with
its text.
"""

import ast
import re
from collections.abc import Iterator

from distflow.commands.migration.settings import ForeignSettings, Unread
from distflow.errors import UserError, joined

METHODS = {"GRPO": "grpo", "RLOO": "rloo", "PPO": "ppo", "SFT": "sft", "Reward": "rm"}
"""What trains here as a trainer of TRL does: GRPOTrainer, which takes a GRPOConfig."""

_CLASS = re.compile(r"(\w+?)(Trainer|Config)")
_OF_ANY_TRAINER = ("TrainingArguments", "ModelConfig", "ScriptArguments")
_ADAPTERS = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
}
_DEFAULTS_OF_PEFT = {"lora_r": 8, "lora_alpha": 8}
_READ_ELSEWHERE = ("args", "config", "peft_config", "processing_class", "tokenizer")
_SHOWN = 60


def read_script(text: str) -> ForeignSettings:
    """Raises UserError if it trains nothing that trains here."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = str(error).replace("(<unknown>, line", "(line")
        raise UserError(f"it is not a valid Python script: {what}") from error
    calls = sorted(_calls(tree), key=lambda call: call[1].lineno)
    found = ForeignSettings("TRL", _method(calls))
    kind = next(name for name, method in METHODS.items() if method == found.method)
    for name, call in calls:
        if name in (f"{kind}Config", f"{kind}Trainer", "LoraConfig", *_OF_ANY_TRAINER):
            _add_arguments(found, name, call)
    if found.method == "rloo":
        found.remarks.append(
            "epsilon: the ratio is clipped for each token here, in TRL's RLOO for the whole "
            "response"
        )
    return found


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Each call with the last word of what it calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            yield name, node


def _method(calls: list[tuple[str, ast.Call]]) -> str:
    """What the last trainer trains, or the last config if the script makes no trainer."""
    classes = [
        (found[1], found[2], call.lineno)
        for name, call in calls
        if (found := _CLASS.fullmatch(name))
    ]
    trainers = [each for each in classes if each[1] == "Trainer"]
    configs = [each for each in classes if each[1] == "Config" and each[0] in METHODS]
    if not trainers and not configs:
        known = joined([f"{name}Config" for name in METHODS])
        raise UserError(f"it calls neither a trainer nor a config of TRL ({known})")
    kind, role, line = (trainers or configs)[-1]
    if kind not in METHODS:
        known = joined([f"{name}Trainer" for name in METHODS])
        raise UserError(
            f"line {line}: {kind}{role} uses an unsupported method; {known} are supported"
        )
    return METHODS[kind]


def _add_arguments(found: ForeignSettings, name: str, call: ast.Call) -> None:
    given = [(item.arg or f"**{_shown(item.value)}", item.value) for item in call.keywords]
    if name == "LoraConfig":
        given = [(_ADAPTERS.get(key, key), value) for key, value in given]
        for key, default in _DEFAULTS_OF_PEFT.items():
            found.values.setdefault(key, default)
    positional = call.args
    if positional and name.endswith("Trainer"):
        given.insert(0, ("model", positional[0]))
        positional = positional[1:]
    for node in positional:
        found.remarks.append(
            f"line {node.lineno}: {name}({_shown(node)}): give the argument its name"
        )
    for key, node in given:
        if name.endswith("Trainer") and key in _READ_ELSEWHERE:
            continue
        if key in found.lines:
            found.remarks.append(
                f"line {found.lines[key]}: {key} is given again in line {node.lineno}, which is "
                "read"
            )
        found.add(key, _literal(key, node), node.lineno)


def _literal(key: str, node: ast.expr) -> object:
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    if key == "reward_funcs" and all(isinstance(part, ast.Name | ast.Constant) for part in parts):
        names = [
            part.id if isinstance(part, ast.Name) else ast.literal_eval(part) for part in parts
        ]
        return names if names else None
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        return Unread(f"the script computes it: {_shown(node)}")
    if isinstance(value, tuple):
        return list(value)
    is_plain = value is None or isinstance(value, str | bool | int | float | list | dict)
    return value if is_plain else Unread(f"a config cannot have it: {_shown(node)}")


def _shown(node: ast.expr) -> str:
    try:
        text = ast.unparse(node)
    except RecursionError:
        return "a nested expression"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
