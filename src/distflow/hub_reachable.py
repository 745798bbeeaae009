"""Whether the hub can be reached from here."""

import functools
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies

REACHED_WITHIN_S = 4.0
"""The hub's client itself retries for most of a minute."""


@functools.cache
def unreachable() -> str | None:
    """Why the hub cannot be reached from here; None if it can. Checked once.

    If not, the libraries that read from it are set to offline mode: cached data still load.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(getproxies().get("https") or constants.ENDPOINT)
    reason = _connects(url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    if reason is not None:
        constants.HF_HUB_OFFLINE = True
        import datasets.config

        datasets.config.HF_HUB_OFFLINE = True
    return reason


def _connects(host: str, port: int) -> str | None:
    """Why it cannot be reached. A name look-up has no timeout: it is left running on its thread."""
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=REACHED_WITHIN_S).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error))

    thread = threading.Thread(target=connect, name="distflow-hub", daemon=True)
    thread.start()
    thread.join(REACHED_WITHIN_S)
    answer = outcome[0] if outcome else f"no answer within {REACHED_WITHIN_S:g} s"
    return answer and f"{host}: {answer}"
