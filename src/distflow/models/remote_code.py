"""Python code that comes with a model's folder, which `transformers` runs where it is trusted."""

from collections.abc import Iterator
from pathlib import Path

from distflow.models.paths import is_local, resolve_path
from distflow.observe.jsonlines import read_object

_NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def code_of(path: str | Path) -> list[str]:
    """What `auto_map` names in the files of a model's or tokenizer's folder, as `FILE.py:CLASS`; sorted.

    Of a hub id, whose files are known once they are loaded, the repository. Raises UserError as `resolve_path`.
    """
    source = resolve_path(path)
    if not is_local(source):
        return [f"Python code of the hub's repository {source}"]
    found = {name for file in _NAMING for name in _texts(read_object(Path(source, file)).get("auto_map"))}
    return sorted(_shown(source, name) for name in found)


def untrusted(code: list[str]) -> str:
    """What to do about code that was not run, for a message."""
    return (
        f"it comes with Python code ({', '.join(code)}), which only actor_rollout_ref.model.trust_remote_code=true runs"
    )


def _texts(value: object) -> Iterator[str]:
    """An entry is a text, or a list of them with gaps (a slow and a fast tokenizer)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _shown(folder: str, name: str) -> str:
    repository, _, reference = name.rpartition("--")
    module, _, attribute = reference.rpartition(".")
    if repository:
        return f"{module}.py:{attribute} of the hub's repository {repository}"
    return f"{Path(folder, module)}.py:{attribute}"
