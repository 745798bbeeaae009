"""Settings of a Python script that trains with TRL: its rewards, data and arguments as settings of TRL."""

import ast
import re
from collections.abc import Mapping

from distflow.commands.migration.script_evaluation import NOT_GIVEN, Object, Rows, Script
from distflow.commands.migration.yaml_and_shell import ForeignSettings, Unread
from distflow.config.migration.tables import all_tables
from distflow.errors import UserError
from distflow.rewards.foreign_signatures import ABSENT

_REWARDS = "my_rewards.py"
_ELSEWHERE = """\
the script takes its settings from a command line: migrate a file with the command that runs it; what the script does \
not say is TRL's default here"""


METHODS = {"GRPO": "grpo", "RLOO": "rloo", "PPO": "ppo", "SFT": "sft", "Reward": "rm"}
"""What trains here as a trainer of TRL does: GRPOTrainer, which takes a GRPOConfig."""
_CLASS = re.compile(r"(\w+?)(?:V2)?(Trainer|Config|Arguments)")
_PEFT = {"LoraConfig": {"r": 8, "lora_alpha": 8}, "unsloth": {"r": 16, "lora_alpha": 16}}
"""Defaults of peft and of unsloth."""
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_LEFT_OUT = (
    *("args", "config", "model_name", "pretrained_model_name_or_path", "bias", "task_type", "inference_mode"),
    *("optimizers", "data_collator", "ref_model", "num_labels"),
)
"""Arguments that hold what the script made of others, which are read where they stand."""
_PLACES = dict.fromkeys(("GRPO", "RLOO"), ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"))
_ADAPTERS = "adapters"
"""In place of a trainer: the owner of arguments of LoRA."""
_OVERLONG, _OVERLONG_LENGTHS = "get_soft_overlong_punishment", ("max_completion_len", "soft_punish_cache")
_PARSERS = ("TrlParser", "HfArgumentParser")


def read_script(text: str, arguments: Mapping[str, object], devices: int | None) -> ForeignSettings:
    """arguments, devices: of the command that runs it. Raises UserError if it trains nothing that trains here."""
    script = _TrlScript(arguments, devices)
    try:
        script.read_file(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(
            f"it is not a valid Python script: {str(error).replace('(<unknown>, line', '(line')}"
        ) from error
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
    adapters_read = any(owner == _ADAPTERS for owner, *_ in script.given)
    for owner, key, value, at, config in script.given:
        of_options = isinstance(value, Unread) and "get_peft_config" in value.why
        if (
            config in (-1, made)
            and not (key == "peft_config" and (adapters_read or of_options))
            and owner in (kind, "", _ADAPTERS if script.has_adapters else kind)
            and value != NOT_GIVEN
            and not (isinstance(value, Unread) and script.has_options and not owner)
        ):
            found.add(*_as_setting(key, value, found.remarks), at)
            found.remarks += _absent_parameters(script, value) if key == "reward_funcs" else []
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


class _TrlScript(Script):
    """What a script gives to trainers of TRL, to their configs, and to models and adapters."""

    def kind_of(self, name: str, role: str) -> str | None:
        """GRPO for GRPOTrainer and GRPOConfig, "" for arguments of any trainer, None for another class."""
        known = self.names.get(name)
        found = _CLASS.fullmatch(known.name if isinstance(known, Object) else name)
        if found is None or found[2] != role and found[1] != "Training":
            return None
        of_trl = isinstance(known, Object) and known.module.startswith("trl")
        if found[1] in METHODS or found[2] == "Trainer" and of_trl:
            return found[1]
        return "" if role == "Config" and found[1] == "Training" and found[2] != "Trainer" else None

    def give(self, owner: str, values: Mapping[str, object], line: int, config: int = -1) -> None:
        for key, value in values.items():
            if key == "model_init_kwargs" and isinstance(value, dict):
                self.give(owner, value, line, config)
            elif key not in _LEFT_OUT:
                self.given.append((owner, key, value, self.lines.get(key, line), config))

    def call_of_library(
        self, node: ast.Call, name: str, owner: object, values: list[object], named: Mapping[str, object]
    ) -> list[object]:
        self.has_options = self.has_options or name in _PARSERS
        if name in (*_PARSERS, "cli"):  # the classes whose objects its methods return
            return [values[0] if name == "cli" or not values or isinstance(values[0], list) else [values[0]]]
        if isinstance(owner, list) and name.startswith("parse_"):
            return [self._parsed(owner, values[0] if values else None, node.lineno)]
        if (kind := self.kind_of(name, "Trainer")) is not None:
            made = (each.made for each in (named.get("args"), *values) if isinstance(each, Object))
            self.trainers.append((kind, node.lineno, max(made, default=-1)))
            self.has_adapters = self.has_adapters or named.get("peft_config") is not None
            places = _PLACES.get(kind, ("model", "args", "data_collator", "train_dataset", "eval_dataset"))
            self.give(kind, dict(zip(places, values, strict=False)) | dict(named), node.lineno)
        elif (kind := self.kind_of(name, "Config")) is not None:
            config = Object(name, made=len(self.configs))
            self.configs.append((kind, node.lineno))
            named = dict(zip(("output_dir",), values, strict=False)) | dict(named)
            self.give(kind, named, node.lineno, config.made)
            self.set_attributes(config, named)
            return [config]
        elif name in ("LoraConfig", "get_peft_model"):
            self.has_adapters = self.has_adapters or name == "get_peft_model"
            kind = "unsloth" if "Fast" in ast.unparse(node.func) else name
            named = {**_PEFT.get(kind, {}), **({"target_modules": "all-linear"} if kind == "unsloth" else {}), **named}
            self.give(
                _ADAPTERS, {_LORA.get(key, key): value for key, value in named.items() if key != "model"}, node.lineno
            )
        elif name == "from_pretrained" and re.search("CausalLM|FastLanguageModel|FastModel", ast.unparse(node.func)):
            self.give("", named, node.lineno)
        elif name == "add_argument":
            default = named.get("default", Unread("its option has no default"))
            for option in (each for each in values if isinstance(each, str) and each.startswith("--")):
                key = ("", str(named.get("dest", option[2:].replace("-", "_"))))
                self.options.add(key[1])
                is_flag = str(named.get("action")).startswith("store_") and "default" not in named
                flag = named["action"] == "store_false" if is_flag else default
                if isinstance(self.attributes.get(key, NOT_GIVEN), Unread):
                    self.attributes[key] = flag
        elif name == "load_dataset" and name not in self.functions:
            return [_rows(values, named)]
        elif name == "concatenate_datasets" and values and isinstance(values[0], list):
            return [values[0]]
        elif name == _OVERLONG:
            return [{"name": name, "options": dict(zip(_OVERLONG_LENGTHS, values, strict=False)) | dict(named)}]
        return []

    def _parsed(self, classes: list[object], given: object, line: int) -> object:
        """The objects that a parser makes of a mapping; of a command line, they have the arguments and defaults."""
        if not isinstance(given, dict):
            return classes
        self.has_mapping = True
        made = [each for each in classes if isinstance(each, Object)]
        own = {key for each in made for of, key in self.attributes if of == each.name}
        for each in made:
            if (kind := self.kind_of(each.name, "Config")) is not None:
                self.give(kind, {key: value for key, value in given.items() if key not in own}, line)
            self.set_attributes(each, given)
        return classes


def _weigh(values: dict[str, object], remarks: list[str]) -> None:
    """TRL's weights of reward functions stand beside them; ours with each. A penalty of long responses is a setting."""
    functions, weights = values.pop("reward.functions", None), values.get("reward_weights")
    parts = functions["default"] if isinstance(functions, dict) else []
    if "math" in parts:  # TRL's accuracy_reward, which reads this column
        values.setdefault("data.answer_key", "solution")
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
        if own["name"] == _OVERLONG:
            limit, tokens = (own["options"].get(key) for key in _OVERLONG_LENGTHS)
            values |= {"reward.overlong.buffer_tokens": tokens, "reward.overlong.factor": own.get("weight", 1.0)}
            remarks += [] if limit == longest else [f"{_OVERLONG}: it ends at {limit} tokens"]
        elif own["name"] is not None:
            kept.append(part)
    if kept:
        values["reward.functions"] = {"default": kept}


def _rows(values: list[object], named: Mapping[str, object]) -> object:
    """The source that load_dataset's arguments name; a list of them for a list of splits."""
    path, config = ([*values, None, None][place] or named.get(name) for place, name in enumerate(("path", "name")))
    split, files = named.get("split"), named.get("data_files")
    if files is not None and path in ("json", "csv", "parquet", "text"):
        if isinstance(files, dict):  # a file, or a list of them, for each split
            splits = {name: Rows(each) if isinstance(each, str) else each for name, each in files.items()}
            return splits[str(split)] if split in splits else splits
        return Rows(files) if isinstance(files, str) else files
    if not isinstance(path, str) or isinstance(split, list):
        return [_rows([path, config], {"split": each}) for each in split] if isinstance(split, list) else path
    part, bracket, _ = str("" if isinstance(split, Unread) else split or "").partition("[")
    changes = (
        (f"the split {split}: data.train_max_samples and data.val_max_samples take the first rows",) if bracket else ()
    )
    config = config if isinstance(config, str) else ""
    return Rows(f"{path}:{config}:{part}" if part else f"{path}:{config}" if config else path, changes)


def _as_setting(key: str, value: object, remarks: list[str]) -> tuple[str, object]:
    """Data and rewards as the config names them."""
    parts = value if isinstance(value, list) else [value]
    changes = [each for part in parts if isinstance(part, Rows) for each in part.changes]
    remarks += [f"{key}: the script changes its rows ({each}); change the file too" for each in changes]
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


def _absent_parameters(script: Script, value: object) -> list[str]:
    """A line for each reward function that requires what only TRL's trainer has."""
    names = [each.name for each in (value if isinstance(value, list) else [value]) if isinstance(each, Object)]
    required = {name: script.required(name) & {*ABSENT} for name in names}
    return [
        f"reward_funcs: {name} takes {min(own)}, which does not exist here" for name, own in required.items() if own
    ]


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
    if value.module.startswith("trl."):
        remarks.append(f"reward_funcs: {value.name} is a function of TRL, which must be installed")
        return f"{value.module}:{value.name}"
    remarks.append(f"reward_funcs: put {value.name} into {_REWARDS} unchanged; data.answer_key names its ground truth")
    return f"{_REWARDS}:{value.name}"
