"""Makes text of models and data harmless to show: it cannot move a cursor, hide itself or turn a line around."""

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, limit: int | None = None, one_line: bool = False) -> str:
    """The text with control, format and unpaired characters written as escapes (`\\x1b`, `\\u202e`).

    one_line: line ends are shown as ⏎. limit: longer text ends in "…", cut before anything else is done with it.
    """
    cut = limit is not None and len(text) > limit
    shown = "".join(_visible_character(character, one_line) for character in (text[:limit] if cut else text))
    return shown + "…" if cut else shown


def _visible_character(character: str, one_line: bool) -> str:
    if character == "\n":
        return "⏎" if one_line else character
    if character == "\t":
        return " "
    if character.isascii() and character.isprintable() or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
