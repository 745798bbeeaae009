"""Resolves model paths: a local folder, a Hugging Face hub id, a model that ships with distflow
(`builtin:NAME`) or with another Python package (`package:NAME`)."""

import importlib.util
from pathlib import Path

from distflow.builtin_names import MODELS
from distflow.errors import UserError
from distflow.hub_id_or_local_path import model_fault, unreachable

BUILTIN_FOLDER = Path(__file__).parent / "builtin"
BUILTIN_PREFIX = "builtin:"
PACKAGE_PREFIX = "package:"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "tekken.json"),
)


def resolve_path(path: str | Path) -> str:
    """The folder (as an absolute path) or hub id that `path` means.

    Raises UserError for an unknown built-in model, a missing package or folder, and a file where a
    folder is wanted."""
    text = str(path)
    if text.startswith(BUILTIN_PREFIX):
        name = text.removeprefix(BUILTIN_PREFIX)
        if name not in MODELS:
            raise UserError(f"there is no built-in model '{name}'; there are: {', '.join(MODELS)}")
        return str(BUILTIN_FOLDER / name)

    if text.startswith(PACKAGE_PREFIX):
        # of an installed Python package, which is not imported
        name = text.removeprefix(PACKAGE_PREFIX)
        found = None
        if name.isidentifier():
            found = importlib.util.find_spec(name)

        if found is None or not found.submodule_search_locations:
            raise UserError(
                f"model path 'package:{name}': the Python package '{name}' is not installed here"
            )

        return found.submodule_search_locations[0]

    folder = Path(text).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if fault := model_fault(text):
        what, advice = fault
        raise UserError(
            f"model path '{text}': {what}; {advice}, or give a hub id (org/name) or builtin:NAME"
        )

    unreachable()  # within seconds, and the libraries are informed
    return text


def is_local(resolved: str) -> bool:
    """Whether a resolved path is a local folder, not a hub id."""
    return Path(resolved).is_dir()


def why_not_loaded(resolved: str, reason: str) -> str:
    """The message for a model that could not be loaded. reason: the library's error."""
    if is_local(resolved):
        return reason

    no_folder = f"there is no folder '{resolved}' in {Path.cwd()}"
    if unreached := unreachable():
        return (
            f"{no_folder}, and the hub cannot be reached ({unreached}): write the path of a "
            "folder, or check the network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy)"
        )

    return f"{reason}; {no_folder}; on the hub, check its name, and HF_TOKEN if it requires a login"
