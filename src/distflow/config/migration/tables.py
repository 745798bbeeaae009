"""Names of keys in other systems: one TOML file a system, read when a key is first looked up."""

import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

ANY: tuple[Any, ...] = (...,)
"""All values, for a name that is harmless with any value."""
NOT_GIVEN: Any = object()
"""In place of a value, if only the name is asked for."""

_OVERRIDE = re.compile(r" (?=[a-z_]+\.[\w.]+=)")  # between two overrides
_PLAIN = re.compile(r"[\w./:+~-]+")

_MOST_SYNONYMS = 2
SYSTEMS = ("verl", "siiRL", "TRL", "AReaL", "OpenRLHF", "ROLL")
_SHORT_FORMS = {
    "ACTOR": "actor_rollout_ref.actor",
    "REF": "actor_rollout_ref.ref",
    "ROLLOUT": "actor_rollout_ref.rollout",
    "MODEL": "actor_rollout_ref.model",
    "CORRECTION": "algorithm.rollout_correction",
}
_CONSTANTS = {"null": None, "true": True, "false": False}
HARMLESS = {"any": ANY, "off": (None, False)}


@dataclass(frozen=True)
class Name:
    """A name of another system."""

    ours: str = ""
    """The key with the same meaning, or whole overrides, with `{}` for the value; empty if there is
    none."""
    note: str = ""
    """Further advice, e.g. another unit, or why there is no such key."""
    values: Mapping[Any, str] = field(default_factory=dict)
    """Values with another name here: the value for `ours`, or whole overrides."""
    harmless: tuple[Any, ...] = ()
    """Values that change nothing here; such a setting is accepted."""

    def accepts(self, value: object) -> bool:
        return self.harmless == ANY or any(_same(value, other) for other in self.harmless)

    def overrides(self, value: object) -> str:
        """The overrides for it, `key=value` separated by spaces; empty if there are none."""
        text = "..." if value is NOT_GIVEN else as_override(value)
        for theirs, ours in self.values.items():
            if not _same(value, theirs):
                continue
            if "=" in ours:
                return ours
            text = ours
            break

        template = self.ours
        if template and "=" not in template:
            template = f"{template}={{}}"
        return template.replace("{}", text)

    def answer(self, value: object) -> str:
        write = self.overrides(value)
        if not write:
            parts = [self.note, self.in_words()]
        else:
            parts = [f"write {write}", self.note]
        return "; ".join(part for part in parts if part)

    def in_words(self) -> str:
        return ", ".join(
            f"`{as_override(theirs)}` is `{ours}`" for theirs, ours in self.values.items()
        )


@dataclass(frozen=True)
class Table:
    """The keys of one system."""

    names: Mapping[str, Name]
    """By key; `*` in a key stands for any part."""
    values: Mapping[str, Mapping[Any, str]]
    """For keys of both systems, the values that have another name here."""
    tuning: Mapping[str, Name]
    """Names that mean something else in supervised fine-tuning and of reward models; there they
    come first."""
    defaults: Mapping[str, Mapping[str, object]]
    """The system's defaults of unset keys, by kind of training: grpo, ppo (both: rl), sft, rm
    (both: tuning), or all."""
    computed: Mapping[str, Mapping[str, str]]
    """Likewise our keys, with a formula of its keys and of `devices`, which stand as names with
    dots."""
    beside_keys: Mapping[str, str]
    """Other names of the system, with their counterparts here."""
    newer_names: Mapping[str, str]
    """What newer versions call its keys, with the names above."""
    example: Mapping[str, Any]
    """A well-known run of the system, and the same run here, for the docs."""

    def find(self, key: str, method: str = "") -> Name | None:
        """The name for a key: its own entry, else the first pattern that matches. method: what is
        trained."""
        if method in ("sft", "rm") and key in self.tuning:
            return self.tuning[key]
        if key in self.names:
            return self.names[key]

        for own, name in self.names.items():
            if "*" in own and fnmatchcase(key, own):
                return name

        return None


@cache
def all_tables() -> Mapping[str, Table]:
    return {
        system: read_table(Path(__file__).with_name(f"{system.lower()}.toml")) for system in SYSTEMS
    }


def table_of_runs(system: str) -> Table:
    """The table for whole runs of a system: those of verl and siiRL have the keys of both."""
    tables = all_tables()
    if system not in ("verl", "siiRL"):
        return tables[system]
    verl = tables["verl"]
    return replace(verl, names={**tables["siiRL"].names, **verl.names})


def find_names(key: str) -> dict[str, Name]:
    """The name in each system that has the key."""
    found = {system: table.find(key) for system, table in all_tables().items()}
    return {system: name for system, name in found.items() if name is not None}


def find_value(key: str, value: object) -> str | None:
    """The name here of verl's value for a key that both have, if it differs."""
    return all_tables()["verl"].values.get(key, {}).get(value)


def find_synonyms(key: str, value: object, known: Collection[str] = ()) -> list[str]:
    """What other systems' value of a key is here, the most common first: a value of `known`, or
    whole overrides."""
    text = str(value).lower()
    found = Counter(_synonyms().get((key, text), ()))
    for table in all_tables().values():
        for theirs, ours in _values_of(table, key):
            if isinstance(theirs, str) and theirs.lower() == text:
                found[ours if " " in ours else ours.removeprefix(f"{key}=")] += 1

    likely = [word for word, _ in found.most_common() if "=" in word or word in known]
    return likely[:_MOST_SYNONYMS]


def _values_of(table: Table, key: str) -> Iterator[tuple[Any, str]]:
    """Each of a system's values that is one of our key, or sets it besides: theirs, and ours."""
    yield from table.values.get(key, {}).items()
    for name in table.names.values():
        for theirs, ours in name.values.items():
            is_override = "=" in ours
            if f"{key}=" in ours or (name.ours == key and not is_override):
                yield theirs, ours


@cache
def _synonyms() -> Mapping[tuple[str, str], list[str]]:
    """By key and lower-case word."""
    found = dict[tuple[str, str], list[str]]()
    for keys, entry in read_toml(Path(__file__).parents[1] / "synonyms.toml").items():
        for words, ours in entry.items():
            for key, word in product(expand(keys), expand(words)):
                found.setdefault((key, word.lower()), []).append(ours)
    return found


def as_override(value: object) -> str:
    """A value as in `key=VALUE` on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_override(item)}" for name, item in value.items()) + "}"

    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def split_overrides(text: str) -> dict[str, str]:
    """The keys of `key=value key=value`, each with the text of its value."""
    return dict(part.split("=", 1) for part in _OVERRIDE.split(text))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file in which short forms in capitals stand for groups."""
    text = path.read_text(encoding="utf-8")
    return tomllib.loads(
        re.sub(r"\b[A-Z]+\b", lambda word: _SHORT_FORMS.get(word[0], word[0]), text)
    )


def read_table(path: Path) -> Table:
    """The table that a file of this folder holds; what it may hold is checked by
    `tests/config/migration`."""
    raw = read_toml(path)
    answers = raw.get("answers", {})
    newer_names = dict[str, str]()
    for keys, name in raw.get("newer_names", {}).items():
        newer_names |= dict.fromkeys(expand(keys), name)

    return Table(
        names=_read_names(raw.get("keys", {}), answers),
        tuning=_read_names(raw.get("fine_tuning", {}), answers),
        values={key: _read_values(entry) for key, entry in raw.get("values", {}).items()},
        defaults=raw.get("defaults", {}),
        computed=raw.get("computed", {}),
        beside_keys=raw.get("beside_keys", {}),
        newer_names=newer_names,
        example=raw.get("example", {}),
    )


def _read_names(entries: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, Name]:
    found: dict[str, Name] = {}
    for keys, entry in entries.items():
        for key in expand(keys):
            found[key] = Name(**_fields(entry, answers, key))
    return found


def expand(keys: str) -> list[str]:
    """`{a,b}.c` is `a.c` and `b.c`."""
    braces = re.search(r"\{([^{}]*)\}", keys)
    if braces is None:
        return [keys]

    found = []
    for word in braces[1].split(","):
        found += expand(keys[: braces.start()] + word + keys[braces.end() :])
    return found


def _fields(entry: Any, answers: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The fields of a `Name`: an entry merged with the answer that it names; its own fields take
    precedence. A `*` at the end of `ours` stands for the last part of the key."""
    if isinstance(entry, str):
        entry = {"ours": entry}
    own = {name: value for name, value in entry.items() if name != "as"}
    fields = {**answers[entry["as"]], **own} if "as" in entry else own
    if str(fields.get("ours")).endswith(".*"):
        fields["ours"] = fields["ours"][:-1] + key.rpartition(".")[2]
    if "values" in fields:
        fields["values"] = _read_values(fields["values"])

    harmless = fields.get("harmless")
    if isinstance(harmless, str):
        fields["harmless"] = HARMLESS[harmless]
    elif harmless is not None:
        fields["harmless"] = tuple(None if value == "null" else value for value in harmless)

    return fields


def _read_values(entry: Mapping[str, str]) -> dict[Any, str]:
    return {constant(name): text for name, text in entry.items()}


def constant(text: str) -> Any:
    """The value of a word of TOML, in which null, true, false and integers are those."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return _CONSTANTS.get(text, text)


def _same(value: object, other: object) -> bool:
    """Equal, but 1 is not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
