"""Settings that no key takes: which they are, and what to write instead."""

from collections.abc import Collection, Iterable

from distflow.config.errors import Problem, nearest
from distflow.config.replaced import REPLACED
from distflow.config.schema import schema_keys
from distflow.config.sources import Setting


def parents(key: str) -> list[str]:
    """The groups above a key, the outermost first: `a`, `a.b` for `a.b.c`."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def is_known(key: str) -> bool:
    """Whether there is such a key or group, or the key lies in a mapping of the user's own names."""
    keys = schema_keys()
    return key in keys or key in _groups() or any(parent in keys and keys[parent].is_map for parent in parents(key))


def unknown_problems(settings: Iterable[Setting]) -> list[Problem]:
    """One problem for each unknown setting (of an unknown group only the group), and for each misused group."""
    problems: list[Problem] = []
    settled: set[str] = set()
    for setting in settings:
        if settled.intersection(parents(setting.key)):
            continue
        problem = _judge(setting)
        if problem is not None:
            problems.append(problem)
        if problem is not None or _is_misread_value(setting):
            settled.add(setting.key)
    return problems


def suggest(key: str, known: Collection[str]) -> str:
    """What to do instead of the unknown key: what replaced it, else the nearest of `known`."""
    for name in (key, *reversed(parents(key))):
        if name in REPLACED:
            return REPLACED[name]
    guess = _nearest_key(key, known)
    return f"did you mean {guess}?" if guess else "see docs/config.md for all keys"


def _judge(setting: Setting) -> Problem | None:
    key, keys = setting.key, schema_keys()
    places = ((key, setting.where),)
    if not is_known(key):
        if setting.is_group and any(name.startswith(f"{key}.") for name in REPLACED):
            return None  # what it holds gets the message
        return Problem(places, "there is no such key", suggest(key, keys))
    if setting.has_dots and (key in keys or key in _groups()):
        advice = "write one level a line: " + ": {".join(key.split(".")) + ": ..." + "}" * key.count(".")
        return Problem(places, "has dots, which YAML reads as one name", advice)
    if key in _groups() and not setting.is_group:
        below = next(name for name in keys if name.startswith(f"{key}."))
        return Problem(places, "is a group of keys, not a value", f"write keys below it, e.g. {below}")
    return None


def _is_misread_value(setting: Setting) -> bool:
    """A mapping for a key that takes none: what is wrong with it is said where its value is read."""
    info = schema_keys().get(setting.key)
    return info is not None and setting.is_group and not info.is_map


def _groups() -> set[str]:
    return {group for key in schema_keys() for group in parents(key)}


def _nearest_key(key: str, known: Collection[str]) -> str:
    """By its end (`actor.clip_ratio`), in its group, by its last word in another group, by spelling."""
    by_end = [name for name in known if name.endswith(f".{key}")]
    if by_end:
        return by_end[0]
    group, _, word = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == group}
    if guess := nearest(word, siblings):
        return siblings[guess]
    same_word = [name for name in known if name.rpartition(".")[2] == word]
    if same_word:
        return nearest(key, same_word) or same_word[0]
    return nearest(key, known)
