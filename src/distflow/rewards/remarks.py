"""What a verifier says of a sample besides its score, within bounds: it is kept with the sample, for people."""

from collections.abc import Mapping

from distflow.observe.jsonlines import JSON

MAX_TEXT = 4000
"""Characters of one text; of a longer one both ends are kept."""
MAX_IN_ALL = 20_000
"""Characters of all that a verifier says of one sample."""
_MAX_ENTRIES, _MAX_DEPTH = 50, 6
_LEFT_OUT = "… left out"


def bounded(remarks: Mapping[object, object]) -> dict[str, JSON]:
    """What JSON can hold of it, long texts without their middle, and what comes behind `MAX_IN_ALL` left out."""
    return _Room().mapping(remarks, 0)


def shortened(text: str, most: int = MAX_TEXT) -> str:
    """At most `most` characters of a text and a word on what is missing between its ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


class _Room:
    def __init__(self) -> None:
        self._left = MAX_IN_ALL

    def mapping(self, value: Mapping[object, object], depth: int) -> dict[str, JSON]:
        found: dict[str, JSON] = {}
        for key, entry in value.items():
            if len(found) == _MAX_ENTRIES or self._left <= 0:
                found[_LEFT_OUT] = len(value) - len(found)
                break
            name = str(key)[:200]
            self._left -= len(name)
            found[name] = self._plain(entry, depth + 1)
        return found

    def _plain(self, value: object, depth: int) -> JSON:
        self._left -= 4
        if isinstance(value, bool | float | None):
            return value
        if isinstance(value, int):
            return value if abs(value) < 2**63 else self._text(f"an integer of {value.bit_length():,} bits")
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            return self.mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset) and depth < _MAX_DEPTH:
            return self._list(list(value), depth)
        return self._text(f"{value!r:.1000}" if not isinstance(value, Mapping | list | tuple | set) else _LEFT_OUT)

    def _list(self, value: list[object], depth: int) -> list[JSON]:
        found: list[JSON] = []
        for entry in value:
            if len(found) == _MAX_ENTRIES or self._left <= 0:
                return [*found, f"{_LEFT_OUT}: {len(value) - len(found):,}"]
            found.append(self._plain(entry, depth + 1))
        return found

    def _text(self, text: str) -> str:
        kept = shortened(text, min(MAX_TEXT, max(self._left, 100)))
        self._left -= len(kept)
        return kept
