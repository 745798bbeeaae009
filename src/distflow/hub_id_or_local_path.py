"""Distinguishes ids of the hub from local paths, and checks whether the hub is reachable."""

import functools
import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from distflow.errors import missing_path

HUB_MODEL = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
REACHED_WITHIN_S = 4.0
"""Time limit, since the hub's client itself retries for most of a minute."""


@functools.cache
def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it can. Checked once.

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
    """Why a host cannot be reached. A name lookup has no timeout: it is left running on its
    thread."""
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


def is_local_model(text: str) -> bool:
    return text.startswith(("builtin:", "package:")) or Path(text).expanduser().is_dir()


def model_fault(text: str) -> tuple[str, str] | None:
    """Checks `model.path`. A possible hub id passes, unless its first part is a local folder."""
    if is_local_model(text):
        return None

    path = Path(text).expanduser()
    if path.is_file():
        gguf = ""
        if path.suffix == ".gguf":
            gguf = f", and its name as actor_rollout_ref.model.gguf_file={path.name}"
        return "is a file", f"use its folder, {path.parent}{gguf}"

    looks_like_a_path = text.startswith((".", "/", "~")) or not HUB_MODEL.fullmatch(text)
    if looks_like_a_path or ("/" in text and path.parent.is_dir() and not _is_cached(text)):
        return missing_path(path)
    return None


def _is_cached(hub_id: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, f"models--{hub_id.replace('/', '--')}").is_dir()
