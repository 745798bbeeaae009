"""The page for those who come from another system, made from the tables of its names and run against the schema.

`python -m distflow.config.key_reference` writes docs/migrating.md.
"""

import shlex
from collections.abc import Iterable, Sequence

from distflow.config.compose.load import load_config
from distflow.config.migration import examples
from distflow.config.migration.names import ANY, NOT_GIVEN, Name, as_override
from distflow.config.migration.tables import all_tables, find_names
from distflow.config.migration.verl_defaults import differing
from distflow.errors import ConfigError

_INTRO = """# Coming from another system

This page is generated from the tables that answer keys of other systems: `python -m distflow.config.key_reference`.

Most keys have the names that users of verl know. The quickest way is to try a command as it is: a key of another system
is answered with ours and your value, all of them at once,

```
  num_generations (command line)
      there is no such key; TRL has it
      → write actor_rollout_ref.rollout.n=8
```

and a setting that asks for nothing that is not so anyway (`use_remove_padding=True`, `model_dtype=fp32`) is accepted
with a line. What cannot be honoured is refused, so that no command trains something else in silence.

A name alone is answered too:

```bash
distflow config quickstart_grpo --explain actor_rollout_ref.actor
```
"""

_VERL = """## verl

`verl_grpo` and `verl_ppo` have verl's own defaults for every key that both have, so that

```
distflow train verl_grpo <the overrides of a command for verl.trainer.main_ppo>
```

trains what verl trains. The presets `grpo` and `ppo` have other defaults; where a key of verl's stands on one of them,
the first lines of the run list what differs and was not set:
"""

_VERL_APART = """Apart from keys, a run differs from verl's in these points:

- Steps cross the borders of epochs; verl leaves out the last incomplete batch of each.
- Mini-batches are drawn anew in each pass; verl takes them in order unless `shuffle` is set.
- `actor_rollout_ref.rollout.val_kwargs.n` counts sampled answers besides the greedy one; verl's counts all. For
  verl's `do_sample=True` it is `actor_rollout_ref.rollout.val_kwargs.greedy=false`.
- `algorithm.kl_ctrl.type=adaptive` needs `target_kl` and `horizon`; verl's are 0.1 and 10000, and follow the mean of
  the means of sequences, `mean=sequence`.
- `trainer.logger` is `[console]` unless a command names others; verl's default has wandb too.
- The grader is `math` for all data sets, where verl chooses one by `data_source`.
- A filter of groups (DAPO) refills a step one group at a time, so that `data.gen_batch_size` is not needed.

### A command, line by line

`examples/grpo_trainer/run_qwen2-7b.sh`, on `verl_grpo`:
"""

_TRL = """## TRL

What GRPOConfig has where nothing is given, and what says it here:
"""

_TRL_SCRIPT = """### A script, line by line

<!-- not run: TRL is not installed here -->
```python
"""


def render() -> str:
    """The whole page."""
    parts = [
        _INTRO,
        _VERL,
        _differences(),
        _VERL_APART,
        _translated_verl(),
        _names("verl"),
        _TRL,
        _defaults("TRL"),
        _TRL_SCRIPT + examples.TRL + "```\n",
        _translated_trl(),
        _names("TRL"),
        "## siiRL\n\nverl's keys, and",
        _names("siiRL"),
        "## AReaL\n",
        _names("AReaL"),
        "## OpenRLHF\n",
        _names("OpenRLHF"),
        "## ROLL\n",
        _names("ROLL"),
    ]
    return "\n".join(parts)


def _differences() -> str:
    """The keys in which the base presets differ from verl's defaults."""
    rows: dict[str, dict[str, str]] = {}
    for base, preset in (("grpo", "verl_grpo"), ("ppo", "verl_ppo")):
        theirs = load_config(preset, complete=False)
        for key, ours, there in differing(load_config(base, complete=False), theirs):
            rows.setdefault(key, {})["verl"] = there
            rows[key][base] = ours
    lines = ["| key | verl | `grpo` | `ppo` |", "|---|---|---|---|"]
    for key, cells in rows.items():
        shown = [f"`{cells[name]}`" if name in cells else "as verl" for name in ("verl", "grpo", "ppo")]
        lines.append(f"| `{key}` | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def _translated_verl() -> str:
    kept = [override for override in examples.VERL if override not in examples.VERL_LEFT_OUT]
    said = {line.partition("=")[0]: f"accepted: {line.partition(': ')[2]}" for line in _notes(kept)}
    said |= {key: f"refused: {text}" for key, text in _refusals(examples.VERL_LEFT_OUT)}
    rows = [(f"`{override}`", said.get(override.partition("=")[0], "the same")) for override in examples.VERL]
    return _table("there", "here", rows) + "\nso that this trains it:\n\n" + _command("verl_grpo", kept)


def _notes(overrides: Sequence[str]) -> tuple[str, ...]:
    return load_config("verl_grpo", overrides).notes


def _refusals(overrides: Sequence[str]) -> Iterable[tuple[str, str]]:
    try:
        load_config("verl_grpo", overrides, complete=False)
    except ConfigError as error:
        return [
            (problem.places[0][0].partition(" ")[0], f"{problem.what}; {problem.advice}") for problem in error.problems
        ]
    return []


def _translated_trl() -> str:
    rows: list[tuple[str, str]] = []
    for key, value in examples.TRL_ARGUMENTS:
        name = find_names(key)["TRL"]
        answer = "; ".join(part for part in (_code(name.overrides(value)), name.note) if part)
        rows.append((f"`{key}={value!r}`", "as above" if answer in dict(rows).values() else answer))
    return (
        _table("there", "here", rows)
        + "\nThe reward function goes to a file, with the signature that [rewards](rewards.md) has, and the data to\n"
        "one that [data](data.md) describes:\n\n" + _command("grpo", map(shlex.quote, examples.TRL_HERE))
    )


def _command(preset: str, overrides: Iterable[str]) -> str:
    lines = " \\\n    ".join([f"distflow train {preset}", *overrides])
    return f"<!-- not run: it needs the model and the data -->\n```bash\n{lines}\n```\n"


def _defaults(system: str) -> str:
    defaults = all_tables()[system].defaults
    return _table("there", "here", [(_code(there), _code(ours)) for there, ours in defaults.items()])


def _names(system: str) -> str:
    """Both tables of a system; keys that are answered alike share a row."""
    table = all_tables()[system]
    rows: dict[str, list[str]] = {}
    for key, name in table.names.items():
        rows.setdefault(_meaning(name), []).append(f"`{key}`")
    keys = _table(f"{system}'s key", "here", [(", ".join(keys), meaning) for meaning, keys in rows.items()])
    others = _table("there", "here", table.beside_keys.items())
    return f"### {system}'s keys\n\n{keys}\n### {system} beside its keys\n\n{others}"


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
        parts.append("accepted at " + ", ".join(f"`{as_override(value)}`" for value in name.harmless))
    return "; ".join(part for part in parts if part)


def _table(there: str, here: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {there} | {here} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_cell(left)} | {_cell(right)} |" for left, right in rows)]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
