"""The reference page of all keys, made from the schema.

`python -m distflow.config.key_reference` writes docs/config.md, and docs/migrating.md beside it.
"""

import sys
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from distflow.builtin_names import (
    ESTIMATORS,
    PIPELINES,
    POLICY_LOSSES,
    REWARDS,
    ROLLOUT_ENGINES,
    TRACKERS,
    TRAIN_ENGINES,
    Entry,
)
from distflow.config.compose.origins import PRESETS, preset_names
from distflow.config.compose.values import type_name
from distflow.config.domains import domain_keys
from distflow.config.keys.declare import KeyInfo
from distflow.config.keys.schema import schema_keys
from distflow.config.migration import page
from distflow.config.serialize import RESUMABLE, show_value

_INTRO = """# Configuration

This page is generated from the schema: `python -m distflow.config.key_reference`.

`distflow train PRESET|FILE.yaml [key=value ...]` composes the defaults below, a preset, a file and the command line, in
this order. A file builds on a preset (or on a file beside it) with

```yaml
defaults: [grpo, _self_]
```

Overrides have Hydra's grammar: `key=value`, `~key` takes back what a preset or file set. Every key has a default, so
`+key=value` and `++key=value` mean the same as `key=value`, and an unknown key is an error in each form. A mapping with
names of your own (`reward.functions`, `..._kwargs`) replaces its default as a whole where it is set; later files and
the command line then add to it. In Python the group `async` is `config.async_`.

`distflow config PRESET key=value` prints the resolved config, with `--explain KEY` what a key means and who set it.
"""

_OWN_GROUPS = """## Groups of your own

A dataclass becomes a group of keys, checked like the others; `trainer.imports` names the module that registers it.

```python
from dataclasses import dataclass
from distflow.config import key, register_config_group

@dataclass(frozen=True)
class MyConfig:
    threshold: float = key(0.5, "what counts as a hit", minimum=0, maximum=1)

register_config_group("my_custom", MyConfig)    # my_custom.threshold=0.7 → config.my_custom.threshold
```
"""


_OF_OTHERS = """## Keys of other systems

Keys of verl, siiRL, TRL, AReaL, OpenRLHF and ROLL are answered with the key here: [migrating](migrating.md) lists them.
"""


def render() -> str:
    """The whole page."""
    parts = [_INTRO, _presets(), "## Keys\n"]
    tables_of_groups = {name: _table(name, keys) for name, keys in _by_group(schema_keys().values()).items()}
    tables_of_groups["data"] += "\n" + _table("data.domains.NAME", domain_keys().values())
    parts += tables_of_groups.values()
    tables: tuple[tuple[str, Mapping[str, Entry]], ...] = (
        ("Advantage estimators", ESTIMATORS),
        ("Policy losses", POLICY_LOSSES),
        ("Reward functions", REWARDS),
        ("Pipelines", PIPELINES),
        ("Rollout engines", ROLLOUT_ENGINES),
        ("Train engines", TRAIN_ENGINES),
        ("Trackers", TRACKERS),
    )
    parts.append("## Built-in names\n")
    parts += [_names(title, names) for title, names in tables]
    parts += [_OWN_GROUPS, _resumable(), _OF_OTHERS]
    return "\n".join(parts)


def main() -> None:
    """Write both pages to the folder given, else to docs."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for name, text in (("config.md", render()), ("migrating.md", page.render())):
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


def _presets() -> str:
    lines = ["## Presets\n"]
    for name in preset_names():
        text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        lines.append(f"- `{name}`: " + " ".join(line.lstrip("# ") for line in comment))
    return "\n".join(lines) + "\n"


def _by_group(keys: Iterable[KeyInfo]) -> dict[str, list[KeyInfo]]:
    groups: dict[str, list[KeyInfo]] = {}
    for info in keys:
        groups.setdefault(info.name.rpartition(".")[0], []).append(info)
    return groups


def _table(group: str, keys: Iterable[KeyInfo]) -> str:
    lines = [f"### {group}\n", "| key | default | type | allowed | meaning |", "|---|---|---|---|---|"]
    for info in keys:
        name = info.name.rpartition(".")[2]
        default = f"`{show_value(info, info.default)}`"
        cells = [f"`{name}`", default, f"`{type_name(info.annotation)}`", info.spec.allowed(), info.spec.description]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _names(title: str, table: Mapping[str, Entry]) -> str:
    lines = [f"### {title}\n", "| name | what it is |", "|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {_cell(entry.description)} |" for name, entry in table.items()]) + "\n"


def _resumable() -> str:
    names = ", ".join(f"`{name}`" for name in sorted(RESUMABLE))
    return (
        f"## What may change when a run is resumed\n\n{names}. Any other key is refused unless it is allowed by name.\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
