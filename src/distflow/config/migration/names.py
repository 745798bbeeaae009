"""What a name of another system is called here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANY: tuple[Any, ...] = (...,)
"""All values: of a name that is harmless whatever it is set to."""
NOT_GIVEN: Any = object()
"""In place of a value, where only the name is asked about."""

_PLAIN = re.compile(r"[\w./:+~-]+")


@dataclass(frozen=True)
class Name:
    """A name of another system.

    ours: the key that says the same, or whole overrides with `{}` for the value; empty where no key does.
    note: what else one must know: another unit, why there is no such key.
    values: what a value is called here, where it is called otherwise: the value for `ours`, or whole overrides.
    harmless: values that ask for nothing that is not so anyway; such a setting is accepted.
    """

    ours: str = ""
    note: str = ""
    values: Mapping[Any, str] = field(default_factory=dict)
    harmless: tuple[Any, ...] = ()

    def accepts(self, value: object) -> bool:
        """Whether a setting to this value needs no answer but a line."""
        return self.harmless == ANY or any(_same(value, other) for other in self.harmless)

    def overrides(self, value: object) -> str:
        """What to write for it, `key=value` separated by spaces; empty where nothing says it."""
        known = [new for old, new in self.values.items() if _same(value, old)]
        if known and "=" in known[0]:
            return known[0]
        text = known[0] if known else "..." if value is NOT_GIVEN else as_override(value)
        template = self.ours if not self.ours or "{}" in self.ours else f"{self.ours}={{}}"
        return template.replace("{}", text)

    def answer(self, value: object) -> str:
        """What to do instead of setting it."""
        write = self.overrides(value)
        parts = [self.note, self.in_words()] if not write else [f"write {write}", self.note]
        return "; ".join(part for part in parts if part)

    def in_words(self) -> str:
        """What its values are called here."""
        return ", ".join(f"`{as_override(there)}` is `{here}`" for there, here in self.values.items())


def as_override(value: object) -> str:
    """A value as it would stand behind `key=` on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_override(item)}" for name, item in value.items()) + "}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("'", "\\'") + "'"


def _same(value: object, other: object) -> bool:
    """Equal, but 1 is not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
