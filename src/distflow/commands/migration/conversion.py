"""`distflow migrate`: a config of ours from a command or a config of another system: what its table
says of each key, and what its formulas give."""

import argparse
import re
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from distflow.commands.migration.formulas import compute, entries_for
from distflow.commands.migration.read_files import read_foreign
from distflow.commands.migration.settings import ForeignSettings, Unread
from distflow.commands.migration.trl_rewards import convert_rewards
from distflow.config.compose.load_config import Loaded, load_config, preset_config, with_changes
from distflow.config.compose.setting_origins import COMMAND_LINE, preset_names
from distflow.config.compose.typed_values import nested
from distflow.config.compose.unknown_keys import is_known
from distflow.config.derived_settings import data_files
from distflow.config.keys.schema import flatten, schema_keys
from distflow.config.migration import tables
from distflow.errors import ConfigError, UserError

_PRESETS = {
    **{
        (system, method): f"verl_{method}"
        for system in ("verl", "siiRL")
        for method in ("grpo", "ppo")
    },
    **{("ROLL", "grpo"): "rlvr", ("TRL", "rloo"): "grpo"},
}
_REWARDS_OF_ROLL = {
    "(?i:ifeval)": "ifeval",
    "Math": "math",
    "Code": "code",
    "General": "exact_match",
    "Judge": "judge",
}
_IN_SCRIPT = """\
rewards and columns: AReaL's script has them; check reward.functions (here math), data.prompt_key and data.answer_key"""  # noqa: E501
_BY_SOURCE = """\
rewards: {system} chooses a function by each row's data_source; here it is math for all rows: check reward.functions"""  # noqa: E501
_OF_MEGATRON = """\
actor_rollout_ref.actor.strategy=megatron: it is not implemented yet; fsdp shards the weights over all devices"""  # noqa: E501
_OF_OPENRLHF = """\
reward_func: OpenRLHF calls it with lists, as reward_func(queries, prompts, labels); write it with the parameters \
solution_strs and ground_truths, and without the prompt before each response (docs/rewards.md)"""  # noqa: E501
_LIKE_VERL = ("verl", "siiRL")
_GRADES_OF_VERL = (
    "custom_reward_function.path",
    "reward.custom_reward_function.path",
    "reward_model.enable",
)
_JUDGE = "generating_args."
_FILTER = "algorithm.filter_groups."
_OPTIMIZER = "actor_rollout_ref.actor.optim."
_ONE_OPTIMIZER = ("OpenRLHF", "TRL")
"""Systems whose options of the optimizer, but for the learning rate, are those of actor and
critic."""
_SHARES = "actor_train.data_args.domain_interleave_probs"


@dataclass
class Conversion:
    """A config under way."""

    preset: str

    overrides: dict[str, str]
    """Our keys, with values as on the command line."""

    given: set[str]
    """Keys that the file sets, and not a default of its system."""

    missing: list[str]
    """What has no counterpart, a line each."""

    without_effect: list[str] = field(default_factory=list)
    """What changes nothing here, a line each."""

    def write(self, values: dict[str, str], given: bool) -> None:
        """Set keys. A default leaves what the file sets as it is."""
        for key, text in values.items():
            before = self.overrides.get(key, text)
            if key in self.given and not given:
                continue
            if key in self.given and before != text:
                self.missing.append(
                    f"{key}={before}: another key of the file says {text}, which is used"
                )
            self.overrides[key] = text
            if given:
                self.given.add(key)

    def drop(self, key: str, why: str) -> None:
        """Remove a key that cannot be set; a key that nobody set is removed silently."""
        value = self.overrides.pop(key)
        if key in self.given:
            self.missing.append(
                f"{key} {why}" if why.startswith("is '") else f"{key}={value}: {why}"
            )


def convert(theirs: ForeignSettings, devices: int | None) -> Conversion:
    """devices: that it trains on; None if the settings say it."""
    table = tables.table_of_runs(theirs.system)
    if theirs.system == "TRL":
        _follow_trl(theirs, table)
    preset = _PRESETS.get((theirs.system, theirs.method), theirs.method)
    draft = Conversion(preset, {}, set(), list(theirs.remarks))
    _spread_mappings(theirs, table, draft)
    values = {**_defaults(theirs, table), **theirs.values}
    computed = compute(table, theirs, values, devices, draft.missing)
    used = computed.used
    _say_what_to_check(theirs, used, draft)
    if "ref.path" in theirs.values and theirs.values["ref.path"] == theirs.values.get("actor.path"):
        used |= {"ref.path"}
        draft.without_effect.append("ref.path: the reference is always the policy's first weights")
    if theirs.system == "ROLL":
        used |= _convert_domains(theirs, draft)
    if devices is None:
        draft.missing += _other_devices(theirs.values)
    for key, value in sorted(values.items(), key=lambda item: _order(item[0])):
        if isinstance(value, Unread) or key not in used and key not in computed.idle:
            _convert_setting(theirs, table, key, value, draft)
        elif key in computed.idle and key in theirs.values:
            name = table.find(key, theirs.method)
            why = name.note if name else ""
            why = why or "beside the other settings it changes nothing here"
            draft.without_effect.append(f"{_place(theirs, key)}={tables.as_override(value)}: {why}")
    for key, text in computed.overrides.items():
        draft.write({key: text}, key in computed.given)
    if theirs.method == "ppo" and theirs.system in _ONE_OPTIMIZER:
        for of_actor, text in list(draft.overrides.items()):
            key = of_actor.replace(_OPTIMIZER, "critic.optim.")
            if key not in draft.overrides:
                draft.write({key: text}, of_actor in draft.given)
    return draft


def _follow_trl(theirs: ForeignSettings, table: tables.Table) -> None:
    """What TRL writes in its own ways: rewards, trackers, and flags that begin with `no_`."""
    convert_rewards(theirs.values, theirs.remarks)
    trackers = theirs.values.get("report_to")
    if isinstance(trackers, list):
        theirs.values["report_to"] = trackers[0] if len(trackers) == 1 else ["console", *trackers]
    values: dict[str, object] = {}
    for key, value in theirs.values.items():
        if key.startswith("no_") and key not in table.names and value is True:
            values[key.removeprefix("no_")] = False
        else:
            values[key] = value
    theirs.values = values


def _spread_mappings(theirs: ForeignSettings, table: tables.Table, draft: Conversion) -> None:
    """Make keys of the entries of a mapping that the table has."""
    for key, value in list(theirs.values.items()):
        rest = {}
        known = {}
        for name, each in value.items() if isinstance(value, dict) else ():
            if table.find(f"{key}.{name}", theirs.method):
                known[f"{key}.{name}"] = each
            else:
                rest[name] = each
        if known:
            theirs.values |= {**known, key: rest}
            theirs.lines |= dict.fromkeys(known, theirs.lines.get(key, 0))
    for key, value in list(theirs.values.items()):
        if value == {}:
            draft.without_effect.append(f"{key}: it is empty")
            del theirs.values[key]


def _defaults(theirs: ForeignSettings, table: tables.Table) -> dict[str, object]:
    """The system's own, with those of the switches and groups that the file sets."""
    on = {key if value is True else key.rpartition(".")[0] for key, value in theirs.values.items()}
    switches = [key for key in table.defaults if key in on]
    found = entries_for(table.defaults, theirs.method, *switches)
    return {key: None if value == "null" else value for key, value in found.items()}


def _say_what_to_check(theirs: ForeignSettings, used: set[str], draft: Conversion) -> None:
    """Lines on what a system has outside of its settings. used: keys that sizes came from."""
    values = theirs.values
    is_rl = theirs.method in ("grpo", "ppo")
    if any(key.endswith(("max_length", "max_seq_length", "max_len")) for key in used):
        is_set = any("max_" in key for key in used & values.keys())
        half_of = "it" if is_set else f"{theirs.system}'s default"
        draft.missing.append(
            f"max_length: prompts and responses have separate limits, here half of {half_of}; "
            "`distflow data check` shows which lengths your data have"
        )
    if theirs.system == "AReaL" and is_rl:
        draft.missing.append(_IN_SCRIPT)
    elif theirs.system == "AReaL" and theirs.method == "rm":
        draft.missing.append(
            "columns: AReaL's script has them; check data.prompt_key, data.chosen_key, "
            "data.rejected_key"
        )
    if theirs.system in _LIKE_VERL and is_rl and not any(map(values.get, _GRADES_OF_VERL)):
        draft.missing.append(_BY_SOURCE.format(system=theirs.system))
    if values.get("actor_rollout_ref.actor.strategy") == "megatron":
        draft.missing.append(_OF_MEGATRON)
    if theirs.system == "OpenRLHF" and str(values.get("remote_rm_url")).endswith(".py"):
        draft.missing.append(_OF_OPENRLHF)


def _other_devices(values: Mapping[str, object]) -> list[str]:
    """A line for devices that generate or score, beside those that train: the config counts those
    that train."""
    maps = {
        key: each
        for key, each in values.items()
        if key.endswith("device_mapping") and isinstance(each, list)
    }
    train = maps.get("actor_train.device_mapping", [])
    others = {each for devices in maps.values() for each in devices} - {*train}
    count = len(others)
    says = "device_mapping"
    # of OpenRLHF; asynchronous engines have devices of their own
    shared = values.get("colocate_all_models")
    sizes = (
        [("vllm_num_engines", "vllm_tensor_parallel_size", "")]
        if values.get("async_train") or not shared
        else []
    )
    sizes += [("critic_num_gpus_per_node", "critic_num_nodes", "colocate_all_models")]
    sizes += [("reward_num_gpus_per_node", "reward_num_nodes", "colocate_critic_reward")]
    sizes += [("ref_num_gpus_per_node", "ref_num_nodes", "colocate_actor_ref")]
    for size, times, together in sizes:
        own = values.get(size)
        factor = values.get(times, 1)
        is_apart = not values.get(together) and (not shared or size.startswith("vllm"))
        if isinstance(own, int) and isinstance(factor, int) and is_apart:
            count = count + own * factor
            says = "vllm_num_engines, *_num_gpus_per_node"
    advice = (
        "all work is on the training devices here; trainer.allocation gives the others devices of "
        "their own"
    )
    if values.get("use_vllm") and values.get("vllm_mode") == "server":  # of TRL
        return [
            (
                "vllm_mode=server: vLLM generates on devices of its own, which the config does "
                f"not count; {advice}"
            )
        ]
    return (
        [f"{says}: {count} more devices generate, score or train a critic; {advice}"]
        if count
        else []
    )


def _order(key: str) -> int:
    """A choice comes before the options that refine it, and a switch after the sizes that it
    switches off."""
    return key.endswith((".enable", "overlong_reward_penalty")) - key.endswith(
        ("loss_mode", "policy_loss_type")
    )


def _convert_setting(
    theirs: ForeignSettings, table: tables.Table, key: str, value: object, draft: Conversion
) -> None:
    name = table.find(key, theirs.method)
    if is_known(key) and key not in table.names:
        name = tables.Name(key)
    place = _place(theirs, key)
    # a switch
    if isinstance(value, Unread) and name and "=" in name.ours and "{}" not in name.ours:
        draft.write(tables.split_overrides(name.ours), key in theirs.values)
    elif isinstance(value, Unread):
        advice = name.answer(tables.NOT_GIVEN) if name else ""
        is_harmless = name is not None and name.harmless == tables.ANY and not name.overrides(None)
        said = f"{place}: {value.why}" + (f"; {advice}" if advice else "")
        (draft.without_effect if is_harmless else draft.missing).append(said)
    elif name is None:
        draft.missing.append(
            f"{place}={tables.as_override(value)}: {theirs.system}'s table does not have it"
        )
    elif not name.accepts(value):
        is_address = isinstance(value, str) and "://" in value and "path={}" in name.ours
        is_verls = theirs.system in _LIKE_VERL and isinstance(value, str)
        renamed = tables.find_value(name.ours or key, value) if is_verls else None
        if (text := name.overrides(renamed or value)) and not is_address:
            draft.write(tables.split_overrides(text), key in theirs.values)
        else:
            answer = name.note if is_address else name.answer(value)
            draft.missing.append(f"{place}={tables.as_override(value)}: {answer}")
    elif key in theirs.values:
        draft.without_effect.append(
            f"{place}={tables.as_override(value)}: {name.note or 'it is so here anyway'}"
        )


def _place(theirs: ForeignSettings, key: str) -> str:
    line = theirs.lines.get(key)
    return f"line {line}: {key}" if line else key


def _convert_domains(theirs: ForeignSettings, draft: Conversion) -> set[str]:
    """ROLL's domains, each with a reward worker, its tags, its filter and its share of the rows;
    returns the keys that say so."""
    values, domains, ranges = (
        theirs.values,
        dict[str, dict[str, object]](),
        dict[str, list[object] | None](),
    )
    used = {key for key in values if key.startswith(_SHARES)}

    def take(key: str, otherwise: object = None) -> object:
        used.update({key} & values.keys())
        value = values.get(key, otherwise)
        return otherwise if isinstance(value, Unread) else value

    for name in dict.fromkeys(key.split(".")[1] for key in values if key.startswith("rewards.")):
        own = f"rewards.{name}."
        kind = ".".join(str(values.get(f"rewards.{name}.worker_cls")).split(".")[-2:])
        reward: object = next(
            (ours for part, ours in _REWARDS_OF_ROLL.items() if re.search(part, kind)), None
        )
        where = f"data.domains.{name}.reward"
        draft.missing += (
            [] if reward else [f"rewards.{name}: {kind} has no counterpart; set {where}"]
        )
        if reward == "ifeval":
            reward = "ifeval_share" if take(f"{own}reward_type") == "soft" else reward
            draft.missing.append(
                f"rewards.{name}: {reward} reads IFEval's columns (docs/rewards.md), not func_name"
            )
        if reward == "judge":
            keys = {
                "model": ("judge_model_name", "model_args.model_name_or_path"),
                "base_url": ("judge_api_url",),
            }
            keys |= {
                "temperature": (f"{_JUDGE}temperature",),
                "answer_tokens": (f"{_JUDGE}max_new_tokens",),
            }
            found = {
                ours: [take(own + key) for key in there if own + key in values]
                for ours, there in keys.items()
            }
            reward = {
                "name": "judge",
                "options": {ours: each[0] for ours, each in found.items() if each and each[0]},
            }
            draft.missing += (
                []
                if found["base_url"]
                else [f"rewards.{name}: serve its judge; set base_url in {where}"]
            )
        elif reward:
            take(f"{own}model_args.model_name_or_path")  # a rule takes only its tokenizer
        domains[name] = {"reward": [reward or "math"], "tags": take(f"{own}tag_included") or [name]}
        weight = take(f"{_SHARES}.{name}")
        domains[name] |= {} if weight is None else {"weight": weight}
        rule = f"{own}query_filter_config."
        if (type_of := take(f"{rule}type")) == "mean_filter":
            bounds = (("threshold_down", -1.0), ("threshold_up", 1e9))
            ranges[name] = [
                take(f"{rule}filter_args.{bound}", otherwise) for bound, otherwise in bounds
            ]
        elif type_of == "std_filter" and not values.get(f"{rule}filter_args.std_threshold"):
            ranges[name] = None
            take(f"{rule}filter_args.std_threshold")
        elif type_of not in (None, "no_filter", "std_filter"):
            used -= {f"{rule}type"}
    if ranges:
        bands = {name: tables.as_override(each) for name, each in ranges.items()}
        first, band = next(iter(bands.items()))
        others = ", ".join(f"not {each} of {name}" for name, each in bands.items() if each != band)
        draft.write(
            {f"{_FILTER}enable": "true", f"{_FILTER}metric": "score", f"{_FILTER}mean_range": band},
            True,
        )
        for name in domains.keys() - ranges.keys():
            domains[name]["filter_groups"] = False
        said = (
            f"rewards.*.query_filter_config: one mean_range holds for all domains, here {band} of "
            f"{first}, {others}"
        )
        draft.missing += [said] if others else []
    if domains:
        draft.write({"data.domains": tables.as_override(domains), "data.tag_key": "tag"}, True)
    return used


def compose(draft: Conversion) -> Loaded:
    """The config; a key that is refused is taken out of the draft, and listed there as missing."""
    while True:
        try:
            return load_config(
                draft.preset,
                [f"{key}={text}" for key, text in draft.overrides.items()],
                complete=False,
            )
        except ConfigError as error:
            if not _drop_rejected(draft, error):
                raise


def _drop_rejected(draft: Conversion, error: ConfigError, unless: Container[str] = ()) -> bool:
    """Drop a key of each problem, but not of those that name one of the others; whether there was
    one."""
    before = len(draft.overrides)
    for problem in error.problems:
        places = [(subject.partition(" ")[0], where) for subject, where in problem.places]
        if any(key in unless for key, _ in places):
            continue
        for key, where in places:
            below = [
                own
                for own in draft.overrides
                if f"{own}.".startswith(f"{key}.") or key.startswith(f"{own}.")
            ]
            if where == COMMAND_LINE and below:
                for own in below:
                    draft.drop(own, "; ".join(filter(None, (problem.what, problem.advice))))
                break
    return len(draft.overrides) < before


def as_file(draft: Conversion, loaded: Loaded) -> dict[str, object]:
    """What the config sets, as a file on its preset. A default of the other system stands there if
    the preset has another."""
    values = flatten(loaded.config)
    base = flatten(preset_config(draft.preset))
    keys = schema_keys()
    chosen = {
        key for name in draft.given for key in keys if name == key or name.startswith(f"{key}.")
    }
    set_here = [key for key in keys if loaded.origins.get(key) == COMMAND_LINE]
    written = {
        key: keys[key].spec.plain(values[key])
        for key in set_here
        if key in chosen or values[key] != base[key]
    }
    return {"defaults": [draft.preset, "_self_"], **nested(written)}


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a config (YAML, JSON, TOML) or a file with a command of TRL, OpenRLHF, verl, siiRL, "
        "ROLL or AReaL",
    )
    parser.add_argument(
        "--to",
        metavar="FILE",
        type=Path,
        help="write the config to this file instead of the screen",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=int,
        help="number of training devices, if different from the file",
    )


def run_migrate(arguments: argparse.Namespace) -> int:
    if arguments.devices is not None and arguments.devices < 1:
        raise UserError(f"--devices {arguments.devices}: a run has at least one device")
    if arguments.to is not None:
        _check_target(arguments.to)
    theirs = read_foreign(Path(arguments.file).expanduser())
    draft = convert(theirs, arguments.devices)
    loaded = _without_unread_keys(draft, compose(draft))
    text = f"# From {Path(arguments.file).name}, of {theirs.system}, by distflow migrate\n"
    text += yaml.safe_dump(as_file(draft, loaded), sort_keys=False, allow_unicode=True, width=120)
    if arguments.to is None:
        print(text, end="")
    else:
        arguments.to.write_text(text, encoding="utf-8")
    _print_missing(draft, arguments.to)
    return 0


def _check_target(path: Path) -> None:
    if path.suffix != ".yaml" or "." in path.stem or path.stem in preset_names():
        raise UserError(
            f"--to {path}: the file must be NAME.yaml, where NAME has no dots and is not a preset's"
        )
    if path.exists() or not path.parent.is_dir():
        what = "is there already" if path.exists() else "is in a folder that does not exist"
        raise UserError(f"--to {path}: it {what}; name another file")


def _without_unread_keys(draft: Conversion, loaded: Loaded) -> Loaded:
    """The config without keys that its pipeline does not take; what else a run would be refused for
    is said."""
    from distflow.launch.read_config import read_config
    from distflow.launch.taken_keys import InertKeys

    model = loaded.config.actor_rollout_ref.model.path
    files = data_files(loaded.config, "train_files")
    for key, found in (
        ("actor_rollout_ref.model.path", model),
        ("data.train_files", any(files.values())),
    ):
        if not found:
            draft.missing.append(f"{key} must be set: it is not in the file")
    why = "it may run on another machine than this one"
    elsewhere: list[tuple[str, object, str]] = [
        ("trainer.device", "cpu", why),
        ("trainer.launcher", "ray", why),
    ]
    elsewhere += [
        (key, False, why) for key in schema_keys() if key.endswith(("_offload", "offload_policy"))
    ]
    while model and any(files.values()):
        try:
            read_config(with_changes(loaded, elsewhere))
            break
        except InertKeys as error:
            for name in [*draft.overrides]:
                for reason in [
                    own for key, own in error.keys.items() if f"{name}.".startswith(f"{key}.")
                ][:1]:
                    why = f": {reason}" if reason else f" with these settings ({draft.preset})"
                    draft.drop(name, f"it has no effect{why}")
            loaded = compose(draft)
        except UserError as error:
            if isinstance(error, ConfigError) and _drop_rejected(
                draft, error, {key for key, *_ in elsewhere}
            ):
                loaded = compose(draft)
                continue
            draft.missing.append(f"a run would be rejected: {error}")
            break
    return loaded


def _print_missing(draft: Conversion, to: Path | None) -> None:
    if to is not None:
        print(f"wrote {to}: distflow config {to} shows the complete config", file=sys.stderr)
    for title, lines in (
        ("without effect here", draft.without_effect),
        ("not in the config, or to be checked", draft.missing),
    ):
        said = [*dict.fromkeys(lines)]
        if said:
            print(f"\n{title} ({len(said)}):", *said, sep="\n  ", file=sys.stderr)
