"""Finds unknown keys.

Settings of another system that need no counterpart are accepted; other unknown ones get advice.
"""

from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import chain

from distflow.config.compose.setting_origins import Setting
from distflow.config.keys.schema import schema_keys
from distflow.config.migration.tables import (
    NOT_GIVEN,
    Name,
    all_tables,
    as_override,
    find_names,
    split_overrides,
)
from distflow.errors import Problem, joined

_LEAST_SIMILARITY = 0.7  # of two words; below this they are different words
_JOINED = 0.9  # of names with different word boundaries


def most_similar(name: str, known: Mapping[str, str]) -> list[str]:
    """The value of the known name that was probably meant, or nothing. Each word must be similar:
    `train_batch_sise` is `train_batch_size`, `max_completion_length` is not `max_prompt_length`."""
    scored = [
        (score, other) for other in known if (score := _similarity(name.lower(), other.lower()))
    ]
    return [known[max(scored)[1]]] if scored else []


def _similarity(name: str, other: str) -> float:
    """The mean similarity over groups and words; 0 if any word differs too much."""
    if name.count(".") != other.count("."):
        return 0.0

    ratios = []
    for part, another in zip(name.split("."), other.split("."), strict=True):
        words = part.split("_")
        others = another.split("_")
        least = _LEAST_SIMILARITY
        if len(words) != len(others):
            words = ["".join(words)]
            others = ["".join(others)]
            least = _JOINED

        for pair in zip(words, others, strict=True):
            ratios.append(SequenceMatcher(None, *pair).ratio())
            if ratios[-1] < least:
                return 0.0

    return sum(ratios) / len(ratios)


_SAME_KEYS = {"verl", "siiRL"}  # systems whose commands need few changes to run here
_MOST_PROBLEMS = 30  # each unknown key is compared with all keys
_LISTED = 2  # keys of the same name in other groups; more would not help


def parents(key: str) -> list[str]:
    """The groups above a key, the outermost first: `a`, `a.b` for `a.b.c`."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def is_known(key: str) -> bool:
    """Whether the key or group exists, or the key belongs to an open mapping."""
    keys = schema_keys()
    return (
        key in keys
        or key in _groups()
        or any(parent in keys and keys[parent].is_map for parent in parents(key))
    )


def judge_settings(
    settings: Sequence[Setting], values: Mapping[str, object]
) -> tuple[list[Problem], dict[str, str]]:
    """A problem for each unknown setting (one per unknown group) and each misused group; and, by
    key, a line for each accepted setting of another system.

    values: the composed config as nested plain values; a key of verl or siiRL that agrees with them
    is accepted.
    """
    problems: list[Problem] = []
    accepted: dict[str, str] = {}
    settled: set[str] = set()

    translated: dict[str, set[str]] = {}  # the systems that have a key below a group
    for setting in settings:
        if not is_known(setting.key):
            for parent in parents(setting.key):
                translated.setdefault(parent, set()).update(find_names(setting.key))

    for setting in settings:
        if settled.intersection(parents(setting.key)):
            continue

        problem = None
        if len(problems) < _MOST_PROBLEMS:
            problem = _judge(setting, translated, values, accepted)

        if problem is not None:
            problems.append(problem)
        info = schema_keys().get(setting.key)

        # reading the value reports this
        is_misread = info is not None and setting.is_group and not info.is_map
        if problem is not None or setting.key in accepted or is_misread:
            settled.add(setting.key)

    return problems, accepted


def suggest(key: str, known: Collection[str], value: object = NOT_GIVEN) -> str:
    """Advice for an unknown key: its name here if another system has it, else keys of `known` that
    it resembles."""
    if found := find_names(key):
        return _answer(found, value)

    word = key.rpartition(".")[2]
    by_end = [name for name in known if name.endswith(f".{key}")]
    same = [name for name in known if name.rpartition(".")[2] == word]
    is_telling = "_" in word or key.partition(".")[0] in _groups()
    if len(same) > _LISTED or not is_telling:
        same = []
    last_words = dict[str, str]()
    for name in known:
        last_words.setdefault(name.rpartition(".")[2], name)
    near = most_similar(key, {name: name for name in known}) or most_similar(key, last_words)
    guesses = by_end[:1] or same or near
    if guesses:
        return f"did you mean {' or '.join(guesses)}?"

    return "see docs/config.md for all keys, docs/migrating.md for those of other systems"


def look_up(values: Mapping[str, object], key: str) -> object:
    """A key in nested plain values; NOT_GIVEN if it is missing."""
    found: object = values
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return NOT_GIVEN
        found = found.get(part, NOT_GIVEN)

    return found


_BY_DIFFICULTY = (
    "filter the file, or use algorithm.filter_groups or algorithm.difficulty_mask, which measure"
)
_GONE = {
    "trust.audit_freq": "use trust.check_freq: one of so many steps is checked whole (0: none), "
    "beside the first ones, powers of two and the last",
    "trainer.webhook": "each finding is printed, and is a line of events.jsonl in the run's folder",
    "data.curriculum": "set the shares of domains by data.domains.NAME.weight",
    "data.pass_rate": _BY_DIFFICULTY,
    "data.pass_rate_key": _BY_DIFFICULTY,
    "data.skip_outside": _BY_DIFFICULTY,
    "data.skip_epochs": _BY_DIFFICULTY,
    "data.solution_key": "score the solutions with `distflow reward check --response-key COLUMN`",
    "reward.num_actors": "raise reward.num_workers: reward functions run beside each worker",
    "reward.actor_cpus": "raise reward.num_workers: reward functions run beside each worker",
}
"""Keys and groups that were in earlier versions, with what to use."""


def what_replaces(key: str) -> str:
    """What to use in place of a key of an earlier version; empty for another key."""
    for name in (key, *parents(key)):
        if name in _GONE:
            return _GONE[name]
    return ""


def _judge(
    setting: Setting,
    translated: Mapping[str, set[str]],
    values: Mapping[str, object],
    accepted: dict[str, str],
) -> Problem | None:
    key = setting.key
    if not is_known(key):
        return _judge_unknown(setting, translated, values, accepted)

    keys = schema_keys()
    places = ((key, setting.where),)

    if setting.has_dots and (key in keys or key in _groups()):
        advice = (
            "write one level a line: " + ": {".join(key.split(".")) + ": ..." + "}" * key.count(".")
        )
        return Problem(places, "has dots, which YAML reads as a single name", advice)

    if key in _groups() and not setting.is_group:
        below = next(name for name in keys if name.startswith(f"{key}."))
        written = f"{below}=null" if setting.value is None else below
        return Problem(
            places, "is a group of keys, not a value", f"write keys below it, e.g. {written}"
        )

    return None


def _judge_unknown(
    setting: Setting,
    translated: Mapping[str, set[str]],
    values: Mapping[str, object],
    accepted: dict[str, str],
) -> Problem | None:
    key = setting.key
    names = find_names(key)
    by_name = {system for system, table in all_tables().items() if key in table.names}
    if setting.is_group and translated.get(key, set()) - by_name:
        return None  # its entries are reported
    if line := _acceptance(setting, names, values):
        accepted[key] = line
        return None

    what = "there is no such key"
    if names:
        what += f"; {joined(list(names))} {_has_it(names)} it"

    value = setting.value
    if isinstance(value, str) and "${" in value:
        value = look_up(values, key)
    similar = list(_groups() if setting.is_group else schema_keys())
    advice = what_replaces(key) or suggest(key, similar, value)

    return Problem(((key, setting.where),), what, advice)


def _acceptance(setting: Setting, found: dict[str, Name], values: Mapping[str, object]) -> str:
    """The line for a setting that changes nothing here, whichever system it comes from; else
    empty."""
    reasons = []
    for name in found.values():
        overrides = name.overrides(setting.value)
        if name.accepts(setting.value):
            reasons.append(name.note or "it asks for nothing")
        elif found.keys() <= _SAME_KEYS and overrides and _has(values, overrides):
            reasons.append(f"here it is {overrides}, which is already set")
        else:
            return ""

    given = ""
    if setting.value is not NOT_GIVEN:
        given = f"={as_override(setting.value)}"

    if reasons:
        return f"{setting.key}{given} ({joined(list(found))}): {reasons[0]}"
    return ""


def _has(values: Mapping[str, object], overrides: str) -> bool:
    """Whether nested plain values agree with each of `key=value ...`."""
    return all(
        _is_same(as_override(look_up(values, key)), text)
        for key, text in split_overrides(overrides).items()
    )


def _is_same(text: str, other: str) -> bool:
    try:
        return text == other or float(text) == float(other)
    except ValueError:
        return False


def _answer(found: dict[str, Name], value: object) -> str:
    """The answer for each system that has the name; systems that agree share one."""
    systems: dict[str, list[str]] = {}
    for system, name in found.items():
        systems.setdefault(name.answer(value), []).append(system)
    if len(systems) == 1:
        return next(iter(systems))
    return " | ".join(f"in {joined(names)}: {text}" for text, names in systems.items())


def _groups() -> frozenset[str]:
    return _groups_above(tuple(schema_keys()))


@cache
def _groups_above(keys: tuple[str, ...]) -> frozenset[str]:
    return frozenset(chain.from_iterable(map(parents, keys)))


def _has_it(found: Mapping[str, Name]) -> str:
    return "has" if len(found) == 1 else "have"
