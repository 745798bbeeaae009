"""Settings of a Python script that trains with TRL: its rewards, data and arguments as settings of TRL."""

import ast
from collections.abc import Mapping

from distflow.commands.migration.script_evaluation import (
    ADAPTERS,
    METHODS,
    NOT_GIVEN,
    OVERLONG,
    OVERLONG_LENGTHS,
    Object,
    Rows,
    Script,
)
from distflow.commands.migration.yaml_and_shell import ForeignSettings, Unread
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError

_REWARDS = "my_rewards.py"
_ELSEWHERE = """\
the script takes its settings from a command line: migrate a file with the command that runs it; what the script does \
not say is TRL's default here"""


def read_script(text: str, arguments: Mapping[str, object]) -> ForeignSettings:
    """arguments: of the command that runs it. Raises UserError if it trains nothing that trains here."""
    script = Script(arguments)
    try:
        script.read_file(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"it is not a valid Python script: {error}") from error
    if not script.trainers:
        raise UserError("it does not call a trainer of TRL (GRPOTrainer, SFTTrainer, ...)")
    kind, line, made = script.trainers[-1]
    if kind not in METHODS:
        known = ", ".join(f"{name}Trainer" for name in METHODS)
        raise UserError(f"line {line}: {kind}Trainer uses an unsupported method; {known} are supported")
    found = ForeignSettings("TRL", METHODS[kind], remarks=script.remarks)
    if kind == "RLOO":
        found.remarks.append("epsilon: the ratio is clipped for each token here, in TRL's RLOO for the whole response")
    if len({each[:2] for each in script.trainers}) > 1:
        found.remarks.append(f"the script calls several trainers; {kind}Trainer in line {line} is read")
    configs = {place: at for place, (owner, at) in enumerate(script.configs) if owner in (kind, "")}
    made = made if made in configs else max(configs, default=-1)
    if others := sorted({*configs.values()} - {configs.get(made, 0)}):
        what = f"the script makes several configs; the {kind}Config in line {configs[made]} is read"
        found.remarks.append(f"{what}, not in line {', '.join(map(str, others))}")
    for names, remark in script.decided:
        is_option = names & script.options or script.has_options and names & script.fields
        found.remarks += [remark] if is_option and not arguments else []
    adapters_read = any(owner == ADAPTERS for owner, *_ in script.given)
    for owner, key, value, at, config in script.given:
        of_options = isinstance(value, Unread) and "get_peft_config" in value.why
        if (
            config in (-1, made)
            and not (key == "peft_config" and (adapters_read or of_options))
            and owner in (kind, "", ADAPTERS if script.has_adapters else kind)
            and value != NOT_GIVEN
            and not (isinstance(value, Unread) and script.has_options and not owner)
        ):
            found.add(*_as_setting(key, value, found.remarks), at)
    for key in (key for key in arguments if script.has_options and key not in script.fields):
        found.add(key, arguments[key], 0)
    if script.has_options and not arguments and not script.has_mapping:
        found.remarks.append(_ELSEWHERE)
    for key in ("processing_class", "tokenizer"):
        if isinstance(found.values.get(key), Unread) or found.values.get(key) == found.values.get("model"):
            found.values.pop(key, None)
    _weigh(found.values, found.remarks)
    return found


def name_rewards(values: dict[str, object], remarks: list[str]) -> None:
    """Reward functions as a command or a YAML file names them: those of a registry, of a module, or models."""
    names = values.get("reward_funcs")
    parts = names if isinstance(names, list) else [names]
    if all(isinstance(part, str) for part in parts):
        named = [(part, *str(part).rpartition(".")) for part in parts]
        found = [
            Object(name, module or "trl") if f"{module}{name}".replace(".", "").isidentifier() else part
            for part, module, _, name in named
        ]
        key, functions = _as_setting("reward_funcs", found, remarks)
        del values["reward_funcs"]
        values[key] = functions
        _weigh(values, remarks)


def _weigh(values: dict[str, object], remarks: list[str]) -> None:
    """TRL's weights of reward functions stand beside them; ours with each. A penalty of long responses is a setting."""
    functions, weights = values.pop("reward.functions", None), values.get("reward_weights")
    parts = functions["default"] if isinstance(functions, dict) else []
    if isinstance(weights, list | tuple) and len(weights) == len(parts):
        named = [part if isinstance(part, dict) else {"name": part} for part in parts]
        parts = [part | {"weight": weight} for part, weight in zip(named, weights, strict=True)]
        del values["reward_weights"]
    kept, longest = (
        [],
        values.get("max_completion_length", all_tables()["TRL"].defaults["grpo"]["max_completion_length"]),
    )
    for part in parts:
        own = part if isinstance(part, dict) else {"name": part}
        if own["name"] == OVERLONG:
            limit, tokens = (own["options"].get(key) for key in OVERLONG_LENGTHS)
            values |= {"reward.overlong.buffer_tokens": tokens, "reward.overlong.factor": own.get("weight", 1.0)}
            remarks += [] if limit == longest else [f"{OVERLONG}: it ends at {limit} tokens"]
        elif own["name"] is not None:
            kept.append(part)
    if kept:
        values["reward.functions"] = {"default": kept}


def _as_setting(key: str, value: object, remarks: list[str]) -> tuple[str, object]:
    """Data and rewards as the config names them."""
    parts = value if isinstance(value, list) else [value]
    changes = [each for part in parts if isinstance(part, Rows) for each in part.changes]
    remarks += [f"{key}: the script changes its rows ({each}); change the file too" for each in changes]
    if key == "report_to" and isinstance(value, list) and len(value) == 1:
        return key, value[0]
    if key != "reward_funcs" or isinstance(value, Unread):
        return key, _plain(value)
    return "reward.functions", {
        "default": [_as_reward(each, remarks) for each in (value if isinstance(value, list) else [value])]
    }


def _plain(value: object) -> object:
    """As a config can have it; `Unread` if it cannot have a part of it."""
    if isinstance(value, Rows | Object):
        return value.source if isinstance(value, Rows) else Unread("it is an object of the script")
    if not isinstance(value, list | dict):
        return value
    parts = [_plain(part) for part in (value.values() if isinstance(value, dict) else value)]
    found = dict(zip(value, parts, strict=True)) if isinstance(value, dict) else parts
    return next((part for part in parts if isinstance(part, Unread)), found)


def _as_reward(value: object, remarks: list[str]) -> object:
    """None for one that cannot be read."""
    if isinstance(value, Unread):
        remarks.append(f"reward_funcs: {value.why}; add what it does to reward.functions")
        return None
    if isinstance(value, dict):
        return value
    if not isinstance(value, Object):
        return {"name": "model", "options": {"path": str(value)}}
    if value.name == "accuracy_reward" and value.module.startswith("trl"):
        return "math"
    remarks.append(f"reward_funcs: put {value.name} into {_REWARDS} unchanged; data.answer_key names its ground truth")
    return f"{_REWARDS}:{value.name}"
