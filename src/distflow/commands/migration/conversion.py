"""`distflow migrate`: a config of ours from a command or a config of another system: what its table
says of each key, and what its formulas give."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from distflow.commands.migration.formulas import Computed, compute, entries_for
from distflow.commands.migration.read_files import read_foreign
from distflow.commands.migration.settings import ForeignSettings, Unread
from distflow.config.compose.load_config import Loaded, load_config, preset_config, with_changes
from distflow.config.compose.setting_origins import COMMAND_LINE, preset_names
from distflow.config.compose.typed_values import nested
from distflow.config.compose.unknown_keys import is_known
from distflow.config.derived_settings import data_files
from distflow.config.keys.schema import flatten, schema_keys
from distflow.config.migration import tables
from distflow.errors import ConfigError, Problem, UserError

_PRESETS = {
    ("verl", "grpo"): "verl_grpo",
    ("verl", "ppo"): "verl_ppo",
    ("siiRL", "grpo"): "verl_grpo",
    ("siiRL", "ppo"): "verl_ppo",
    ("ROLL", "grpo"): "rlvr",
    ("TRL", "rloo"): "grpo",
}
_OF_SOURCES = (
    "rewards: a function is chosen by each row's data_source there; here it is math for all rows: "
    "check reward.functions",
)
_TO_CHECK = {
    "AReaL": (
        "rewards and columns: AReaL's script has them; check reward.functions (here math), "
        "data.prompt_key and data.answer_key",
    ),
    "verl": _OF_SOURCES,
    "siiRL": _OF_SOURCES,
    "ROLL": (
        "rewards: data.domains has a reward for each domain (docs/rewards.md); here it is math for "
        "all rows",
    ),
}
"""By system, what it has outside of its settings."""
_GRADES = (
    "custom_reward_function.path",
    "reward.custom_reward_function.path",
    "reward_model.enable",
)
"""Keys of verl that name one reward for all rows."""
_OF_MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron: it is not implemented yet; fsdp shards the weights "
    "over all devices"
)
_OPTIMIZER = "actor_rollout_ref.actor.optim."
_ONE_OPTIMIZER = ("OpenRLHF", "TRL")
"""Systems whose options of the optimizer, but for the learning rate, are those of actor and
critic."""


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
    """devices: that it trains on; None if the file says it."""
    table = tables.table_of_runs(theirs.system)
    if theirs.system == "TRL":
        _follow_trl(theirs, table)
    preset = _PRESETS.get((theirs.system, theirs.method), theirs.method)
    draft = Conversion(preset, {}, set(), list(theirs.remarks))
    _spread_mappings(theirs, table, draft)
    values = {**_defaults(theirs, table), **theirs.values}
    computed = compute(table, theirs, values, devices or theirs.devices, draft.missing)
    _say_what_to_check(theirs, computed, draft)

    for key in sorted(values, key=_order):
        value = values[key]
        if isinstance(value, Unread) or key not in computed.used | computed.idle:
            _convert_setting(theirs, table, key, value, draft)
        elif key in computed.idle and key in theirs.values:
            name = table.find(key, theirs.method)
            note = name.note if name else ""
            why = note or "beside the other settings it changes nothing here"
            draft.without_effect.append(f"{key}={tables.as_override(value)}: {why}")

    for key, text in computed.overrides.items():
        draft.write({key: text}, key in computed.given)

    if theirs.method == "ppo" and theirs.system in _ONE_OPTIMIZER:
        for of_actor, text in list(draft.overrides.items()):
            key = of_actor.replace(_OPTIMIZER, "critic.optim.")
            if key not in draft.overrides:
                draft.write({key: text}, of_actor in draft.given)

    return draft


def _say_what_to_check(theirs: ForeignSettings, computed: Computed, draft: Conversion) -> None:
    """What no key of theirs says, or what is another thing here."""
    values = theirs.values
    if theirs.method in ("grpo", "ppo") and not any(map(values.get, _GRADES)):
        draft.missing += _TO_CHECK.get(theirs.system, ())
    if values.get("actor_rollout_ref.actor.strategy") == "megatron":
        draft.missing.append(_OF_MEGATRON)

    if any(key.endswith(("max_length", "max_seq_length", "max_len")) for key in computed.used):
        draft.missing.append(
            "max_length: prompts and responses have separate limits, here half of it each; "
            "`distflow data check` shows which lengths your data have"
        )

    if "ref.path" in values and values["ref.path"] == values.get("actor.path"):
        computed.used.add("ref.path")
        draft.without_effect.append("ref.path: the reference is always the policy's first weights")


def _follow_trl(theirs: ForeignSettings, table: tables.Table) -> None:
    """What TRL writes in its own ways: trackers, and flags that begin with `no_`."""
    trackers = theirs.values.get("report_to")
    if isinstance(trackers, list):
        if len(trackers) == 1:
            theirs.values["report_to"] = trackers[0]
        else:
            theirs.values["report_to"] = ["console", *trackers]

    for key in [*theirs.values]:
        if key.startswith("no_") and key not in table.names and theirs.values[key] is True:
            del theirs.values[key]
            theirs.values[key.removeprefix("no_")] = False


def _spread_mappings(theirs: ForeignSettings, table: tables.Table, draft: Conversion) -> None:
    """Make keys of the entries of a mapping that the table has."""
    for key, value in list(theirs.values.items()):
        if not isinstance(value, dict):
            continue

        rest = dict(value)
        for name, each in value.items():
            if table.find(f"{key}.{name}", theirs.method):
                theirs.values[f"{key}.{name}"] = each
                del rest[name]

        theirs.values[key] = rest
        if not rest:
            del theirs.values[key]
            if not value:
                draft.without_effect.append(f"{key}: it is empty")


def _defaults(theirs: ForeignSettings, table: tables.Table) -> dict[str, object]:
    """The system's own, with those of the switches and groups that the file sets."""
    switches = []
    for key, value in theirs.values.items():
        switch = key if value is True else key.rpartition(".")[0]
        if switch in table.defaults and switch not in switches:
            switches.append(switch)

    found = entries_for(table.defaults, theirs.method, *switches)
    for key, value in found.items():
        if value == "null":
            found[key] = None

    return found


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
    is_given = key in theirs.values
    if isinstance(value, Unread):
        _convert_unread(key, value, name, is_given, draft)
        return

    setting = f"{key}={tables.as_override(value)}"
    if name is None:
        draft.missing.append(f"{setting}: {theirs.system}'s table does not have it")
        return
    if name.accepts(value):
        if is_given:
            draft.without_effect.append(f"{setting}: {name.note or 'it is so here anyway'}")
        return
    if isinstance(value, str) and "://" in value and "path={}" in name.ours:  # no file
        draft.missing.append(f"{setting}: {name.note}")
        return

    renamed = None
    if theirs.system in ("verl", "siiRL") and isinstance(value, str):
        renamed = tables.find_value(name.ours or key, value)

    text = name.overrides(renamed or value)
    if text:
        draft.write(tables.split_overrides(text), is_given)
    else:
        draft.missing.append(f"{setting}: {name.answer(value)}")


def _convert_unread(
    key: str, value: Unread, name: tables.Name | None, is_given: bool, draft: Conversion
) -> None:
    """A key whose value the file does not say."""
    line = f"{key}: {value.why}"
    if name is None:
        draft.missing.append(line)
    elif "=" in name.ours and "{}" not in name.ours:  # a switch
        draft.write(tables.split_overrides(name.ours), is_given)
    elif name.harmless == tables.ANY and not name.overrides(None):
        draft.without_effect.append(line)
    else:
        advice = name.answer(tables.NOT_GIVEN)
        draft.missing.append(f"{line}; {advice}" if advice else line)


def compose(draft: Conversion) -> Loaded:
    """The config; a key that is refused is taken out of the draft, and listed there as missing."""
    while True:
        overrides = [f"{key}={text}" for key, text in draft.overrides.items()]
        try:
            return load_config(draft.preset, overrides, complete=False)
        except ConfigError as error:
            before = len(draft.overrides)
            for problem in error.problems:
                _drop_rejected(draft, problem)
            if len(draft.overrides) == before:
                raise


def _drop_rejected(draft: Conversion, problem: Problem) -> None:
    for subject, where in problem.places:
        key = subject.partition(" ")[0]
        below = []
        for name in draft.overrides:
            if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}."):
                below.append(name)

        if where == COMMAND_LINE and below:
            for name in below:
                draft.drop(name, "; ".join(filter(None, (problem.what, problem.advice))))
            return


def as_file(draft: Conversion, loaded: Loaded) -> dict[str, object]:
    """What the config sets, as a file on its preset. A default of the other system stands there if
    the preset has another."""
    values = flatten(loaded.config)
    base = flatten(preset_config(draft.preset))

    written = {}
    for key, info in schema_keys().items():
        is_chosen = any(f"{key}.".startswith(f"{name}.") for name in draft.given)
        is_set = loaded.origins.get(key) == COMMAND_LINE
        if is_set and (is_chosen or values[key] != base[key]):
            written[key] = info.spec.plain(values[key])

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
        what = "is in a folder that does not exist"
        if path.exists():
            what = "is there already"
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

    while model and any(files.values()):
        try:
            read_config(_on_any_machine(loaded))
            break
        except InertKeys as error:
            for name in [*draft.overrides]:
                below = f"{name}."
                reasons = [why for key, why in error.keys.items() if below.startswith(f"{key}.")]
                if reasons:
                    draft.drop(name, f"it has no effect: {reasons[0] or f'with {draft.preset}'}")
            loaded = compose(draft)
        except UserError as error:
            draft.missing.append(f"a run would be rejected: {error}")
            break

    return loaded


def _on_any_machine(loaded: Loaded) -> Loaded:
    """The config without what this machine may lack."""
    why = "it may run on another machine than this one"
    changes: list[tuple[str, object, str]] = [
        ("trainer.device", "cpu", why),
        ("trainer.launcher", "ray", why),
    ]
    for key in schema_keys():
        if key.endswith(("_offload", "offload_policy")):
            changes.append((key, False, why))

    return with_changes(loaded, changes)


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
