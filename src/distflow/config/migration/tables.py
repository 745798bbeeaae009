"""Names of other systems, one file of plain data a system: what says the same here, what is accepted as it is."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from distflow.config.migration import areal, openrlhf, roll, siirl, trl, verl
from distflow.config.migration.names import NOT_GIVEN, Name, as_override

SYSTEMS: dict[str, Mapping[str, Name]] = {
    "verl": verl.NAMES,
    "siiRL": siirl.NAMES,
    "TRL": trl.NAMES,
    "AReaL": areal.NAMES,
    "OpenRLHF": openrlhf.NAMES,
    "ROLL": roll.NAMES,
}

_PATTERNS = {
    system: [(pattern, name) for pattern, name in names.items() if "*" in pattern] for system, names in SYSTEMS.items()
}

__all__ = ["NOT_GIVEN", "SYSTEMS", "Name", "as_override", "find_by_last_word", "find_names"]


def find_names(key: str) -> dict[str, Name]:
    """What each system that has the key means by it. In a table `*` stands for any part of a key, and what stands
    first counts."""
    found = {system: _find(key, system) for system in SYSTEMS}
    return {system: name for system, name in found.items() if name is not None}


def find_by_last_word(key: str) -> dict[str, Name]:
    """The same for a key in another group than there, or in none: `trainer.num_generations`, `eps_clip_higher`."""
    word = key.rpartition(".")[2]
    if "_" not in word and word == key:
        return {}
    found = {}
    for system, names in SYSTEMS.items():
        same = [name for other, name in names.items() if other.rpartition(".")[2] == word]
        if same and all(name == same[0] for name in same) and ("_" in word or word in names):
            found[system] = same[0]
    return found


def _find(key: str, system: str) -> Name | None:
    if key in SYSTEMS[system]:
        return SYSTEMS[system][key]
    return next((name for pattern, name in _PATTERNS[system] if fnmatchcase(key, pattern)), None)
