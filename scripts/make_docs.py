"""Writes the generated pages of the docs: docs/config.md from the schema of the config,
docs/migrating.md from the tables of names in other systems, docs/schema.md from the schema of a
run's folder, docs/metrics.md from the table of metrics, and docs/methods.md from the files of the
methods.

    make docs

Each is written from its template in `pages`, in which a line `$name` stands for a generated part.
"""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distflow import builtin_names
from distflow.commands.methods import read_method
from distflow.config.compose.load_config import differing, load_config
from distflow.config.compose.setting_origins import describe_preset, method_names, preset_names
from distflow.config.compose.typed_values import type_name
from distflow.config.keys.data import DomainConfig
from distflow.config.keys.declare import KeyInfo, collect
from distflow.config.keys.schema import RESUMABLE, schema_keys, show_value
from distflow.config.migration.tables import (
    ANY,
    HARMLESS,
    NOT_GIVEN,
    SYSTEMS,
    Name,
    all_tables,
    as_override,
)
from distflow.errors import ConfigError
from distflow.launch.run_folders.sql_views import VIEWS
from distflow.observe.metrics import metric_table
from distflow.observe.sample_files import COLUMNS, SCHEMA_VERSION

_BUILTIN_NAMES: Mapping[str, Mapping[str, builtin_names.Entry]] = {
    "[advantage estimators](methods.md#advantage-estimators)": builtin_names.ESTIMATORS,
    "[policy losses](methods.md#policy-losses)": builtin_names.POLICY_LOSSES,
    "[reward functions](rewards.md)": builtin_names.REWARDS,
    "[pipelines](pipelines.md)": builtin_names.PIPELINES,
    "[rollout engines](rollout.md)": builtin_names.ROLLOUT_ENGINES,
    "[train engines](training.md)": builtin_names.TRAIN_ENGINES,
    "[trackers](observe.md#terminal-and-trackers)": builtin_names.TRACKERS,
}
"""What has names of its own, with the page that describes them."""

_METHODS = {
    "all": "all",
    "rl": "GRPO, RLOO, PPO",
    "grpo": "GRPO",
    "rloo": "RLOO, where it differs from GRPO",
    "ppo": "PPO",
    "tuning": "SFT, reward models",
    "sft": "SFT",
    "rm": "reward models",
}


_NAMES_A_PART = re.compile(r"[`_]|[a-z]\.[a-z]")
"""In a note: a key, a page or a command."""
_IGNORED = "accepted, without effect; a message says why"
_ABSENT = "rejected, with what to do, except where the value asks for what distflow does anyway"


def main() -> None:
    """Write the pages to the folder in the first argument, by default `docs`."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    pages = {
        "config.md": render_reference,
        "migrating.md": render_migrating,
        "schema.md": render_schema,
        "metrics.md": render_metrics,
        "methods.md": render_methods,
    }
    for name, render in pages.items():
        (folder / name).write_text(render(), encoding="utf-8")
        print(folder / name)


def render_reference() -> str:
    """The page with all keys."""
    groups: dict[str, list[KeyInfo]] = {}
    for info in schema_keys().values():
        groups.setdefault(info.name.rpartition(".")[0], []).append(info)

    tables: dict[str, str] = {}
    first: dict[Any, str] = {}  # the first group with these keys
    for name, keys in groups.items():
        meanings = tuple((_own_name(info), _values(info), info.spec.description) for info in keys)
        same = first.setdefault(meanings, name)
        table = _keys(keys) if same == name else _same_keys(keys, same, groups[same])
        tables[name] = f"### {name}\n\n{table}"

    tables["data"] += f"\n\n### data.domains.NAME\n\n{_domain_keys()}"
    names = [(title, ", ".join(map(_code, entries))) for title, entries in _BUILTIN_NAMES.items()]
    resumable = ", ".join(f"`{name}`" for name in sorted(RESUMABLE))
    parts = {
        "presets": _presets(),
        "keys": "\n\n".join(tables.values()),
        "names": _table(("of", "names"), names),
        "resumable": (
            f"{resumable}. A change of any other key is rejected unless `--allow-change` names it."
        ),
    }

    return _fill("config.md", parts)


def render_migrating() -> str:
    """The page for users of other systems."""
    verl = all_tables()["verl"].example
    trl = all_tables()["TRL"].example
    parts = {f"{system.lower()}_names": _names(system) for system in SYSTEMS} | {
        "verl_differences": _differences(),
        "verl_command": _translated_verl(verl["command"], verl["refused"]),
        "trl_defaults": _table(("method", "defaults"), _defaults("TRL")),
        "trl_script": trl["script"].rstrip(),
        "trl_command": _command("grpo", map(shlex.quote, trl["here"])),
    }

    return _fill("migrating.md", parts)


def render_schema() -> str:
    """The page on what a run's folder holds."""
    kinds = {"text": "text", "number": "float64", "whole": "int64", "json": "text, JSON"}
    columns = [(_code(name), kinds[kind], meaning) for name, (kind, meaning) in COLUMNS.items()]
    views = {
        name: re.sub(r"(\w+) ([A-Z]+)", lambda found: f"`{found[1]}` {found[2].lower()}", kept)
        for name, kept in VIEWS.items()
    }
    views["samples"] = "those of the [files](#samples)"
    parts = {
        "version": f"    schema = {SCHEMA_VERSION}",
        "samples": _table(("column", "type", "content"), columns),
        "views": _table(("view", "columns"), [(_code(name), kept) for name, kept in views.items()]),
    }

    return _fill("schema.md", parts)


def render_metrics() -> str:
    """The page with all metrics."""
    metrics = {metric.name: metric for metric in metric_table()}
    rows = []
    for name, metric in metrics.items():
        whole = metrics.get(name.removesuffix("/*"))
        if whole and metric.doc == f"{whole.doc}, of one domain":
            continue

        by_domain = metrics.get(f"{name}/*")
        is_split = by_domain and by_domain.doc == f"{metric.doc}, of one domain"
        kind = "" if metric.kind == "mean" else metric.kind
        rows.append(
            (
                f"{_code(name)}, `/*`" if is_split else _code(name),
                ", ".join(part for part in (metric.unit, kind) if part),
                metric.doc,
            )
        )

    return _fill("metrics.md", {"metrics": _table(("metric", "unit", "what it is"), rows)})


def render_methods() -> str:
    """The page with all methods, estimators and losses."""
    rows = []
    for method in map(read_method, method_names()):
        what = f"{method.file.title} {method.file.paper}".strip()
        config = method.loaded.config
        estimator = _code(config.algorithm.adv_estimator)
        loss = _code(config.actor_rollout_ref.actor.policy_loss)
        rows.append((_code(method.name), what, estimator, loss, method.needs))

    heads = ("name", "method", "advantages", "loss", "needs")
    parts = {
        "methods": _table(heads, rows),
        "estimators": _algorithms("advantage of a policy token", builtin_names.ESTIMATORS),
        "losses": _algorithms("loss", builtin_names.POLICY_LOSSES),
    }
    return _fill("methods.md", parts)


def _algorithms(what: str, known: Mapping[str, builtin_names.Algorithm]) -> str:
    rows = []
    for name, entry in known.items():
        options = [_code(f"{option}={default}") for option, default in entry.options.items()]
        rows.append((_code(name), entry.description, ", ".join(options)))

    return _table(("name", what, "options"), rows)


def _fill(page: str, parts: Mapping[str, str]) -> str:
    template = Path(__file__).with_name("pages").joinpath(page).read_text(encoding="utf-8")
    return re.sub(r"^\$(\w+)$", lambda found: parts[found[1]], template, flags=re.MULTILINE)


def _presets() -> str:
    return "\n".join(f"- `{name}`: {describe_preset(name)}" for name in preset_names())


def _keys(keys: Iterable[KeyInfo]) -> str:
    rows = [
        (
            _code(_own_name(info)),
            f"`{show_value(info, info.default)}`",
            _values(info),
            info.spec.description,
        )
        for info in keys
    ]
    return _table(("key", "default", "values", "meaning"), rows)


def _own_name(info: KeyInfo) -> str:
    """The last part of the key."""
    return info.name.rpartition(".")[2]


def _same_keys(keys: Sequence[KeyInfo], other: str, others: Sequence[KeyInfo]) -> str:
    """A group with the keys of another one, and the defaults that differ."""
    changed = [
        f"`{_own_name(info)}={show_value(info, info.default)}`"
        for info, there in zip(keys, others, strict=True)
        if info.default != there.default
    ]
    text = f"The keys of `{other}`"
    return f"{text}, but by default {', '.join(changed)}." if changed else f"{text}."


def _domain_keys() -> str:
    """The keys of a domain; those that replace a key of the run share a row a group."""
    own = []
    replacing: dict[str, list[str]] = {}
    for info in collect(DomainConfig()).values():
        key = _own_name(info)
        replaced = re.search(rf"null is ([\w.]+)\.{key}$", info.spec.description)
        if replaced and f"{replaced[1]}.{key}" in schema_keys():
            replacing.setdefault(replaced[1], []).append(_code(key))
        else:
            own.append(info)

    rows = [
        f"| {', '.join(keys)} | `null` | as there | null is the same key of `{group}` |"
        for group, keys in replacing.items()
    ]
    return "\n".join([_keys(own), *rows])


def _values(info: KeyInfo) -> str:
    """The type of a key and its bounds, or its choices; without null where that is the default."""
    kind = type_name(info.annotation)
    if info.default is None:
        kind = kind.removesuffix(" | None")
    allowed = info.spec.allowed()
    if kind == "str" and allowed:
        return allowed
    return f"`{kind}` {allowed}".rstrip()


def _differences() -> str:
    """The keys in which the base presets differ from verl's defaults."""
    rows: dict[str, dict[str, str]] = {}
    for base, preset in (("grpo", "verl_grpo"), ("ppo", "verl_ppo")):
        theirs = load_config(preset, complete=False)
        for key, ours, there in differing(load_config(base, complete=False), theirs):
            rows.setdefault(key, {})["verl"] = there
            rows[key][base] = ours

    columns = ("verl", "grpo", "ppo")
    return _table(
        ("key", "verl", "`grpo`", "`ppo`"),
        [
            (f"`{key}`", *(f"`{cells[name]}`" if name in cells else "as verl" for name in columns))
            for key, cells in rows.items()
        ],
    )


def _translated_verl(command: Sequence[str], refused: Sequence[str]) -> str:
    kept = [override for override in command if override not in refused]
    said = {
        line.partition("=")[0]: f"accepted: {line.partition(': ')[2]}"
        for line in load_config("verl_grpo", kept).notes
    }
    said |= {key: f"rejected: {text}" for key, text in _refusals(refused)}
    rows: dict[str, list[str]] = {}
    for override in command:
        answer = said.get(override.partition("=")[0], "the same")
        rows.setdefault(answer, []).append(_code(override))

    return _table(
        ("verl", "distflow"), [(", ".join(theirs), ours) for ours, theirs in rows.items()]
    )


def _refusals(overrides: Sequence[str]) -> Iterable[tuple[str, str]]:
    try:
        load_config("verl_grpo", overrides, complete=False)
    except ConfigError as error:
        return [
            (problem.places[0][0].partition(" ")[0], f"{problem.what}; {problem.advice}")
            for problem in error.problems
        ]

    return []


def _defaults(system: str) -> Iterator[tuple[str, str]]:
    """The defaults of a system by method."""
    for method, values in all_tables()[system].defaults.items():
        listed = [_code(f"{key}={as_override(value)}") for key, value in values.items()]
        yield _METHODS.get(method, _code(method)), ", ".join(listed)


def _command(preset: str, overrides: Iterable[str]) -> str:
    lines = " \\\n    ".join([f"distflow train {preset}", *overrides])
    return f"<!-- not run: it needs the model and the data -->\n```bash\n{lines}\n```"


def _names(system: str) -> str:
    """Both tables of a system; keys with the same answer share a row."""
    table = all_tables()[system]
    options = Counter(_as_option(key, name) for key, name in table.names.items())

    rows: dict[str, list[str]] = {}
    alone: dict[str, list[str]] = {}  # keys that nothing here takes the place of
    for key, name in table.names.items():
        if not (name.ours or name.values or _NAMES_A_PART.search(name.note)):
            alone.setdefault(_IGNORED if name.harmless == ANY else _ABSENT, []).append(_code(key))
            continue

        option = _as_option(key, name)
        meaning = option if option and options[option] > 1 else _meaning(name)
        rows.setdefault(meaning, []).append(_code(key))

    keys = _table(
        (f"{system}'s key", "distflow"),
        [(", ".join(keys), meaning) for meaning, keys in (rows | alone).items()],
    )
    others = _table((system, "distflow"), table.beside_keys.items())

    return f"### {system}'s keys\n\n{keys}\n\n### Other {system} features\n\n{others}"


def _as_option(key: str, name: Name) -> str:
    """The meaning with `*` for the last part of the key, if both systems call that part the
    same."""
    group = name.ours.removesuffix("." + key.rpartition(".")[2])
    return "" if group == name.ours else _meaning(replace(name, ours=f"{group}.*"))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _meaning(name: Name) -> str:
    parts = [_code(name.overrides(NOT_GIVEN) if "{}" in name.ours else name.ours)]
    if name.values:
        pairs = [f"`{as_override(theirs)}`: `{ours}`" for theirs, ours in name.values.items()]
        parts.append(", ".join(pairs))
    parts.append(name.note)

    if name.harmless == ANY:
        parts.append("accepted")
    elif name.harmless == HARMLESS["off"]:
        parts.append("ok: off")
    elif name.harmless:
        parts.append("ok: " + ", ".join(f"`{as_override(value)}`" for value in name.harmless))

    return "; ".join(part for part in parts if part)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(heads), "|".join(["---"] * len(heads))]
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {lines[0]} |", f"|{lines[1]}|", *(f"| {row} |" for row in cells)])


if __name__ == "__main__":
    main()
