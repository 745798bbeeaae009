"""Recognises a run that this user started on this machine, so that commands may run its code again
without asking.

A start seals the run's config and the files of its code with a key in the user's cache. A folder
from elsewhere has no valid seal, nor has one whose config or code has changed since."""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distflow.config import Config, config_of_run
from distflow.config.keys.schema import to_dict
from distflow.import_target import is_pickled, module_files, split_name
from distflow.launch.user_code import code_of_run
from distflow.observe.crash_safe_files import read_object, to_json
from distflow.untrusted_files import own_cache

SEAL = "seal"
"""Its name in run.json."""
_KEY_BYTES = 32


def seal_run(config: Config) -> str:
    """The seal of a run with this config; empty if it runs no code, or if there is no place for a
    key."""
    code = code_of_run(config, generates_only=False)
    key = _key() if code else None
    return _seal(key, code, to_dict(config)) if key else ""


def is_own_run(run_dir: Path, values: Mapping[str, Any]) -> bool:
    """Whether this user started the run on this machine, with this config, and with code whose
    files have not changed. values: the config as a checkpoint has it."""
    state = run_dir.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        return False
    sealed = read_object(run_dir / "run.json", run_dir).get(SEAL)
    key = _key()
    if not isinstance(sealed, str) or key is None:
        return False
    code = code_of_run(config_of_run(values), generates_only=False)
    return hmac.compare_digest(sealed, _seal(key, code, values))


def _seal(key: bytes, code: list[str], values: Mapping[str, Any]) -> str:
    files = []
    for line in code:
        for file in _files(line):
            files.append(hashlib.sha256(file.read_bytes()).hexdigest())
    content = json.dumps([code, files, to_json(values)], sort_keys=True)
    return hmac.new(key, content.encode(), "sha256").hexdigest()


def _files(line: str) -> Iterator[Path]:
    """The files that a line of `code_of_run` names: of a function, of a module, or among the words
    of a command."""
    for word in line.partition(": ")[2].split():
        place = split_name(word)[0] if ":" in word else word
        is_file = place.endswith(".py") or is_pickled(word)
        stem = place.replace(".", "/")
        modules = [Path(f"{stem}.py"), Path(stem, "__init__.py"), *module_files(place)]
        named = [Path(place).expanduser()] if is_file or "/" in place else modules
        yield from [file for file in named if file.is_file()][:1]


def _key() -> bytes | None:
    """Of this user, made by the first call; None where no folder is only this user's."""
    try:
        file = own_cache() / "run-seal.key"
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as made:
                made.write(secrets.token_bytes(_KEY_BYTES))
        key = file.read_bytes()
    except OSError:
        return None
    return key if len(key) == _KEY_BYTES else None
