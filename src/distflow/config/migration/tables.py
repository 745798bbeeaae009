"""Names of keys in other systems: one TOML file a system, read when a key is first looked up."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ANY: tuple[Any, ...] = (...,)
"""All values, for a name that is harmless with any value."""
NOT_GIVEN: Any = object()
"""In place of a value, if only the name is asked for."""

_PLAIN = re.compile(r"[\w./:+~-]+")

SYSTEMS = ("verl", "siiRL", "TRL", "AReaL", "OpenRLHF", "ROLL")
_SHORT_FORMS = {
    "ACTOR": "actor_rollout_ref.actor",
    "REF": "actor_rollout_ref.ref",
    "ROLLOUT": "actor_rollout_ref.rollout",
    "MODEL": "actor_rollout_ref.model",
    "CORRECTION": "algorithm.rollout_correction",
}
_GROUPS = ("answers", "keys", "values", "defaults", "beside_keys", "example")
_CONSTANTS = {"null": None, "true": True, "false": False}
_HARMLESS = {"any": ANY, "off": (None, False)}


class TableError(ValueError):
    """A table that cannot be read. The message has its file, the key and the problem."""


@dataclass(frozen=True)
class Name:
    """A name of another system.

    ours: the key with the same meaning, or whole overrides with `{}` for the value; empty if there is none.
    note: further advice, e.g. another unit, or why there is no such key.
    values: values with another name here: the value for `ours`, or whole overrides.
    harmless: values that change nothing here; such a setting is accepted.
    """

    ours: str = ""
    note: str = ""
    values: Mapping[Any, str] = field(default_factory=dict)
    harmless: tuple[Any, ...] = ()

    def accepts(self, value: object) -> bool:
        """Whether a setting to this value is accepted."""
        return self.harmless == ANY or any(_same(value, other) for other in self.harmless)

    def overrides(self, value: object) -> str:
        """The overrides for it, `key=value` separated by spaces; empty if there are none."""
        known = [new for old, new in self.values.items() if _same(value, old)]
        if known and "=" in known[0]:
            return known[0]
        text = known[0] if known else "..." if value is NOT_GIVEN else as_override(value)
        template = self.ours if not self.ours or "{}" in self.ours else f"{self.ours}={{}}"
        return template.replace("{}", text)

    def answer(self, value: object) -> str:
        """Advice in place of setting it."""
        write = self.overrides(value)
        parts = [self.note, self.in_words()] if not write else [f"write {write}", self.note]
        return "; ".join(part for part in parts if part)

    def in_words(self) -> str:
        """The names of its values here."""
        return ", ".join(f"`{as_override(there)}` is `{here}`" for there, here in self.values.items())


@dataclass(frozen=True)
class Table:
    """The keys of one system.

    sources: the files of the system from which the keys were taken.
    names: by key; `*` in a key stands for any part.
    values: for keys of both systems, the values that have another name here.
    defaults: the system's defaults as `key=value`, with the override for each here.
    beside_keys: other names of the system, with their counterparts here.
    example: a well-known run of the system, and the same run here, for the docs.
    """

    sources: tuple[str, ...]
    names: Mapping[str, Name]
    values: Mapping[str, Mapping[Any, str]]
    defaults: Mapping[str, str]
    beside_keys: Mapping[str, str]
    example: Mapping[str, Any]

    def find(self, key: str) -> Name | None:
        """The name for a key: its own entry, else the first pattern that matches."""
        if key in self.names:
            return self.names[key]
        return next((name for pattern, name in self._patterns if fnmatchcase(key, pattern)), None)

    @cached_property
    def _patterns(self) -> list[tuple[str, Name]]:
        return [(key, name) for key, name in self.names.items() if "*" in key]


@cache
def all_tables() -> Mapping[str, Table]:
    """The table of each system."""
    return {system: read_table(Path(__file__).with_name(f"{system.lower()}.toml")) for system in SYSTEMS}


def find_names(key: str) -> dict[str, Name]:
    """The name in each system that has the key."""
    found = {system: table.find(key) for system, table in all_tables().items()}
    return {system: name for system, name in found.items() if name is not None}


def find_by_last_word(key: str) -> dict[str, Name]:
    """The same for a key that is in another group there, or in none: `trainer.num_generations`, `eps_clip_higher`."""
    word = key.rpartition(".")[2]
    if "_" not in word and word == key:
        return {}
    found = {}
    for system, table in all_tables().items():
        same = [name for other, name in table.names.items() if other.rpartition(".")[2] == word]
        if same and all(name == same[0] for name in same) and ("_" in word or word in table.names):
            found[system] = same[0]
    return found


def find_value(key: str, value: object) -> str | None:
    """The name here of verl's value for a key that both have, if it differs."""
    return all_tables()["verl"].values.get(key, {}).get(value)


def as_override(value: object) -> str:
    """A value as in `key=VALUE` on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_override(item)}" for name, item in value.items()) + "}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "\\'") + "'"


def read_table(path: Path) -> Table:
    """The table that a file holds. Raises TableError."""
    # Most configs have no key of another system: tomllib is imported where one has.
    import tomllib

    text = re.sub(r"\b[A-Z]+\b", lambda word: _SHORT_FORMS.get(word[0], word[0]), path.read_text(encoding="utf-8"))
    try:
        return _table(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, TableError) as error:
        raise TableError(f"{path.name}: {error}") from error


def _table(raw: dict[str, Any]) -> Table:
    if unknown := raw.keys() - {"sources", *_GROUPS}:
        raise TableError(f"there is no group '{min(unknown)}'")
    if not isinstance(raw.get("sources"), list) or not raw["sources"]:
        raise TableError("'sources' must list the files that the keys were read in")
    groups = {name: _mapping(name, raw.get(name, {})) for name in _GROUPS}
    return Table(
        sources=tuple(raw["sources"]),
        names=dict(_read_names(groups["keys"], groups["answers"])),
        values={key: _read_values(key, entry) for key, entry in groups["values"].items()},
        defaults=_texts("defaults", groups["defaults"]),
        beside_keys=_texts("beside_keys", groups["beside_keys"]),
        example=groups["example"],
    )


def _read_names(entries: Mapping[str, object], answers: Mapping[str, object]) -> Iterator[tuple[str, Name]]:
    seen = set()
    for keys, entry in entries.items():
        name = _read_name(keys, _fields(keys, entry, answers))
        for key in _expand(keys):
            if key in seen:
                raise TableError(f"'{key}' stands there twice")
            seen.add(key)
            yield key, name


def _expand(keys: str) -> list[str]:
    """`{a,b}.c` is `a.c` and `b.c`."""
    braces = re.search(r"\{([^{}]*)\}", keys)
    if braces is None:
        return [keys]
    before, after = keys[: braces.start()], keys[braces.end() :]
    return [key for word in braces[1].split(",") for key in _expand(before + word + after)]


def _fields(key: str, entry: object, answers: Mapping[str, object]) -> dict[str, object]:
    """An entry merged with the answer that it names; its own fields take precedence."""
    if isinstance(entry, str):
        return {"ours": entry}
    fields = dict(_mapping(key, entry))
    answer = str(fields.pop("as", ""))
    if answer and answer not in answers:
        raise TableError(f"'{key}' is answered as '{answer}', which [answers] does not have")
    return {**_fields(answer, answers[answer], {}), **fields} if answer else fields


def _read_name(key: str, fields: Mapping[str, object]) -> Name:
    if unknown := fields.keys() - {"ours", "note", "values", "harmless"}:
        raise TableError(f"'{key}' has a field '{min(unknown)}', which no entry has; keys with dots stand in quotes")
    if not fields.keys() & {"ours", "note", "values"}:
        raise TableError(f"'{key}' has neither a key of ours nor a note nor values")
    texts = _texts(key, {field: text for field, text in fields.items() if field in ("ours", "note")})
    return Name(
        **texts,
        values=_read_values(key, fields.get("values", {})),
        harmless=_read_harmless(key, fields.get("harmless", [])),
    )


def _read_values(key: str, entry: object) -> dict[Any, str]:
    return {_read_value(name): text for name, text in _texts(key, entry).items()}


def _read_value(text: str) -> object:
    """TOML names are str: null, true, false and integers are converted."""
    return int(text) if re.fullmatch(r"-?\d+", text) else _CONSTANTS.get(text, text)


def _read_harmless(key: str, entry: object) -> tuple[Any, ...]:
    if isinstance(entry, list):
        return tuple(None if value == "null" else value for value in entry)
    if not isinstance(entry, str) or entry not in _HARMLESS:
        raise TableError(f"'{key}' is harmless at {entry!r}, which is neither 'any' nor 'off' nor a list of values")
    return _HARMLESS[entry]


def _texts(key: str, entry: object) -> dict[str, str]:
    texts = {}
    for name, text in _mapping(key, entry).items():
        if not isinstance(text, str):
            raise TableError(f"'{key}' has {text!r} for '{name}', where a text must stand")
        texts[name] = text
    return texts


def _mapping(key: str, entry: object) -> Mapping[str, object]:
    if not isinstance(entry, dict):
        raise TableError(f"'{key}' has {entry!r}, where a table must stand")
    return entry


def _same(value: object, other: object) -> bool:
    """Equal, but 1 is not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
