"""What to say about a key that there is not: its replacement, or the nearest one."""

from collections.abc import Collection

from distflow.config.replaced import REPLACED
from distflow.config.values import nearest


def suggest(key: str, known: Collection[str]) -> str:
    """What to do instead of the unknown key: what replaced it, else the nearest of `known`."""
    parent = key
    while parent:
        if parent in REPLACED:
            return REPLACED[parent]
        parent = parent.rpartition(".")[0]
    guess = _nearest_key(key, known)
    return f"did you mean {guess}?" if guess else "see docs/config.md for all keys"


def holds_replaced(group: str) -> bool:
    """Whether keys below an unknown group have a message of their own."""
    return any(name.startswith(f"{group}.") for name in REPLACED)


def _nearest_key(key: str, known: Collection[str]) -> str:
    """By its end (`actor.clip_ratio`), then by its last word in another group, then by spelling."""
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
