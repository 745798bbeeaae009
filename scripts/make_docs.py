"""Writes the generated pages of the docs: docs/config.md from the schema of the config,
docs/migrating.md from the tables of names in other systems, docs/schema.md from the schema of a
run's folder, and docs/metrics.md from the table of metrics.

    make docs

Each is written from its template in `pages`, in which a line `$name` stands for a generated part.
"""

import ast
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from distflow import builtin_names
from distflow.config.compose.load_config import differing, load_config
from distflow.config.compose.setting_origins import PRESETS, preset_names
from distflow.config.compose.typed_values import type_name
from distflow.config.keys.data import DomainConfig
from distflow.config.keys.declare import KeyInfo, collect
from distflow.config.keys.schema import RESUMABLE, schema_keys, show_value
from distflow.config.migration.tables import (
    ANY,
    NOT_GIVEN,
    SYSTEMS,
    Name,
    all_tables,
    as_override,
    find_names,
)
from distflow.errors import ConfigError
from distflow.launch.run_folders.sql_views import VIEWS
from distflow.observe.metrics import metric_table
from distflow.observe.sample_files import COLUMNS, SCHEMA_VERSION

_BUILTIN_NAMES: Mapping[str, Mapping[str, builtin_names.Entry]] = {
    "Advantage estimators": builtin_names.ESTIMATORS,
    "Policy losses": builtin_names.POLICY_LOSSES,
    "Reward functions": builtin_names.REWARDS,
    "Pipelines": builtin_names.PIPELINES,
    "Rollout engines": builtin_names.ROLLOUT_ENGINES,
    "Train engines": builtin_names.TRAIN_ENGINES,
    "Trackers": builtin_names.TRACKERS,
}


_METHODS = {
    "all": "all",
    "grpo": "GRPO",
    "rloo": "RLOO, where it differs from GRPO",
    "ppo": "PPO",
    "tuning": "SFT, reward models",
    "sft": "SFT",
    "rm": "reward models",
}


def main() -> None:
    """Write the pages to the folder in the first argument, by default `docs`."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    pages = {
        "config.md": render_reference,
        "migrating.md": render_migrating,
        "schema.md": render_schema,
        "metrics.md": render_metrics,
    }
    for name, render in pages.items():
        (folder / name).write_text(render(), encoding="utf-8")
        print(folder / name)


def render_reference() -> str:
    """The page with all keys."""
    groups: dict[str, list[KeyInfo]] = {}
    for info in schema_keys().values():
        groups.setdefault(info.name.rpartition(".")[0], []).append(info)
    tables = {name: _keys(name, keys) for name, keys in groups.items()}
    tables["data"] += "\n\n" + _keys("data.domains.NAME", collect(DomainConfig()).values())
    names = [f"### {title}\n\n{_entries(entries)}" for title, entries in _BUILTIN_NAMES.items()]
    resumable = ", ".join(f"`{name}`" for name in sorted(RESUMABLE))
    parts = {
        "presets": _presets(),
        "keys": "\n\n".join(tables.values()),
        "names": "\n\n".join(names),
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
        "trl_defaults": _table(
            ("method", "key", "default"),
            [
                (_METHODS.get(method, _code(method)), _code(key), _code(as_override(value)))
                for method, values in all_tables()["TRL"].defaults.items()
                for key, value in values.items()
            ],
        ),
        "trl_script": trl["script"].rstrip(),
        "trl_arguments": _translated_trl(trl["script"]),
        "trl_command": _command("grpo", map(shlex.quote, trl["here"])),
    }

    return _fill("migrating.md", parts)


def render_schema() -> str:
    """The page on what a run's folder holds."""
    kinds = {"text": "text", "number": "float64", "whole": "int64", "json": "text, JSON"}
    columns = [(_code(name), kinds[kind], meaning) for name, (kind, meaning) in COLUMNS.items()]
    views = [
        (
            _code(name),
            re.sub(r"(\w+) ([A-Z]+)", lambda found: f"`{found[1]}` {found[2].lower()}", kept),
        )
        for name, kept in VIEWS.items()
    ]
    parts = {
        "version": f"    schema = {SCHEMA_VERSION}",
        "samples": _table(("column", "type", "content"), columns),
        "views": _table(("view", "columns"), views),
    }

    return _fill("schema.md", parts)


def render_metrics() -> str:
    """The page with all metrics."""
    rows = [(_code(each.name), each.unit, each.kind, each.doc) for each in metric_table()]
    heads = ("metric", "unit", "parts combine by", "what it is")
    return _fill("metrics.md", {"metrics": _table(heads, rows)})


def _fill(page: str, parts: Mapping[str, str]) -> str:
    template = Path(__file__).with_name("pages").joinpath(page).read_text(encoding="utf-8")
    return re.sub(r"^\$(\w+)$", lambda found: parts[found[1]], template, flags=re.MULTILINE)


def _presets() -> str:
    lines = []
    for name in preset_names():
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        lines.append(f"- `{name}`: " + " ".join(line.lstrip("# ") for line in comment))
    return "\n".join(lines)


def _keys(group: str, keys: Iterable[KeyInfo]) -> str:
    rows = [
        (
            f"`{info.name.rpartition('.')[2]}`",
            f"`{show_value(info, info.default)}`",
            f"`{type_name(info.annotation)}`",
            info.spec.allowed(),
            info.spec.description,
        )
        for info in keys
    ]
    return f"### {group}\n\n" + _table(("key", "default", "type", "allowed", "meaning"), rows)


def _entries(entries: Mapping[str, builtin_names.Entry]) -> str:
    return _table(
        ("name", "description"),
        [(f"`{name}`", entry.description) for name, entry in entries.items()],
    )


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
    rows = [
        (f"`{override}`", said.get(override.partition("=")[0], "the same")) for override in command
    ]

    return (
        _table(("verl", "distflow"), rows)
        + "\n\nThis command trains the rest:\n\n"
        + _command("verl_grpo", kept)
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


def _translated_trl(script: str) -> str:
    """The name here of each argument of the script's GRPOConfig, and of its model."""
    calls = {
        node.func.id: {item.arg: item.value for item in node.keywords}
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    arguments = {**calls["GRPOConfig"], "model": calls["GRPOTrainer"]["model"]}

    rows: dict[str, str] = {}
    for key, node in arguments.items():
        value = ast.literal_eval(node)
        name = find_names(str(key))["TRL"]
        answer = "; ".join(part for part in (_code(name.overrides(value)), name.note) if part)
        rows[f"`{key}={value!r}`"] = "as above" if answer in rows.values() else answer

    return _table(("TRL", "distflow"), rows.items())


def _command(preset: str, overrides: Iterable[str]) -> str:
    lines = " \\\n    ".join([f"distflow train {preset}", *overrides])
    return f"<!-- not run: it needs the model and the data -->\n```bash\n{lines}\n```"


def _names(system: str) -> str:
    """Both tables of a system; keys with the same answer share a row."""
    table = all_tables()[system]
    rows: dict[str, list[str]] = {}
    for key, name in table.names.items():
        rows.setdefault(_meaning(name), []).append(f"`{key}`")
    keys = _table(
        (f"{system}'s key", "distflow"),
        [(", ".join(keys), meaning) for meaning, keys in rows.items()],
    )
    others = _table((system, "distflow"), table.beside_keys.items())

    return f"### {system}'s keys\n\n{keys}\n\n### Other {system} features\n\n{others}"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _meaning(name: Name) -> str:
    parts = [_code(name.overrides(NOT_GIVEN) if "{}" in name.ours else name.ours)]
    if name.values:
        parts.append(name.in_words())
    parts.append(name.note)

    if name.harmless == ANY:
        parts.append("accepted")
    elif name.harmless:
        parts.append(
            "accepted for " + ", ".join(f"`{as_override(value)}`" for value in name.harmless)
        )

    return "; ".join(part for part in parts if part)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(heads), "|".join(["---"] * len(heads))]
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {lines[0]} |", f"|{lines[1]}|", *(f"| {row} |" for row in cells)])


if __name__ == "__main__":
    main()
