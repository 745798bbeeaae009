"""The one error of this room, and the hint that names the nearest existing name."""

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LISTED = 12


class PipelineError(ValueError):
    """A program is not well formed. The message names the node, the field or option, and the nearest existing name."""


def hint(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the nearest of the known names, else "; known: a, b, ..."; empty if none is known."""
    names = sorted({str(other) for other in known})
    if not names:
        return ""
    by_lower = {other.lower(): other for other in names}
    close = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.55)
    if close:
        return f"; did you mean '{by_lower[close[0]]}'?"
    more = ", ..." if len(names) > _MAX_LISTED else ""
    return f"; known: {', '.join(names[:_MAX_LISTED])}{more}"
