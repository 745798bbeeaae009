"""Resolves model paths: a local folder, a Hugging Face hub id, a model that ships with distflow
(`builtin:NAME`) or with another Python package (`package:NAME`). Also finds Python code in a
model's folder, which `transformers` runs if it is trusted.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EFBIG
from itertools import islice
from pathlib import Path

from distflow.builtin_names import MODELS
from distflow.errors import UserError
from distflow.hub_id_or_local_path import model_fault, unreachable
from distflow.observe.crash_safe_files import parse_object, read_object, unreadable
from distflow.untrusted_files import MAX_SOURCE_BYTES, check_file, check_tensors, read_file

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
        found = importlib.util.find_spec(name) if name.isidentifier() else None
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
            "folder, or check the "
            "network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy)"
        )
    return f"{reason}; {no_folder}; on the hub, check its name, and HF_TOKEN if it requires a login"


@contextmanager
def readable(
    what: str, resolved: str, *, runs_code: bool, extra: str | None = None
) -> Iterator[None]:
    """Turns an error of `transformers` about a user's files into a UserError that begins with
    `what`.

    runs_code: whether Python code in the files is run. extra: of distflow, with the packages that
    they need.
    """
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        if extra is not None:
            raise UserError(
                f"{what} needs the packages of the extra: pip install 'distflow[{extra}]'"
            ) from error
        raise UserError(f"{what} needs a package that is not installed: {error}") from error
    except Exception as error:  # a third-party library may raise anything for broken files
        reason = why_not_loaded(resolved, first_lines(error))
        if _CUT in reason:
            reason = f"a file of weights is cut off ({reason}): download or copy the folder again"
        code = [] if runs_code or not is_local(resolved) else code_of(resolved)
        if code:
            reason += (
                f"; it comes with Python code ({', '.join(code)}), which only "
                "actor_rollout_ref.model.trust_remote_code=true runs"
            )
        raise UserError(f"{what} cannot be loaded: {reason}") from error


_CUT = "not fully covered"  # safetensors' message for a file that is shorter than its header says


def first_lines(error: BaseException, limit: int = 300) -> str:
    """The beginning of an error's text, as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."


def require_files(resolved: str, patterns: tuple[str, ...], what: str) -> None:
    """Raise UserError if a local folder has none of the files, or one that cannot be a model's. A
    hub id passes, since its files are not yet known."""
    if not is_local(resolved):
        return
    found = [*islice(Path(resolved).iterdir(), _MOST_FILES + 1)]
    if len(found) > _MOST_FILES:
        raise UserError(
            f"'{resolved}' has more than {_MOST_FILES:,} files: it is not the folder of a model"
        )
    for file in found:  # links may lead elsewhere, e.g. into the hub's cache
        if file.suffix in (*_TEXTS, *_TENSORS) and not file.is_dir():
            try:
                most = _MAX_TEXT_BYTES if file.suffix in _TEXTS else None
                check_file(
                    file, max_bytes=MAX_SOURCE_BYTES if file.name.endswith("config.json") else most
                )
                if file.suffix == ".safetensors":
                    check_tensors(file)
                elif (
                    file.name == "tokenizer.json"
                    and read_file(file).count(b'"content"') > _MOST_ADDED
                ):
                    raise OSError(
                        EFBIG,
                        f"it adds more than {_MOST_ADDED:,} tokens, each of which is searched for",
                    )
            except OSError as error:
                raise unreadable(file, error) from error
    for file in map(Path(resolved).joinpath, (*_LARGEST, _INDEX, "tokenizer_config.json")):
        try:
            if file.is_file():
                _check_content(file)
        except OSError as error:
            raise unreadable(file, error) from error
    if not any(any(Path(resolved).glob(pattern)) for pattern in patterns):
        listed = "" if patterns == (what,) else f" ({', '.join(patterns)})"
        new = " (model.init=random makes new ones)" if what == "weights" else ""
        raise UserError(
            f"model folder '{resolved}' has no {what}{listed}: is it a complete model folder?{new}"
        )


_TEXTS = (".json", ".jinja", ".txt", ".model")
_TENSORS = (".safetensors", ".bin", ".gguf")
_MAX_TEXT_BYTES = 64 * 2**20
"""Twice the size of the largest published tokenizers."""

_MOST_FILES = 10_000
_MOST_WEIGHTS = 500_000
"""Of a folder and of an index. The largest published models have about 90,000 weights."""

_MOST_ADDED = 50_000
"""Tokens that a tokenizer adds to its vocabulary, for each of which a text is searched."""

_NAMING = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
_INDEX = "model.safetensors.index.json"
_LARGEST = {
    "config.json": {
        "num_hidden_layers": 2000,
        "n_layer": 2000,
        "num_layers": 2000,
        "num_labels": 100_000,
    },
    "adapter_config.json": {"r": 16_384},
}
"""Above the largest published; `transformers` and `peft` would build as much as the file says
before they read any weights."""


def _check_content(file: Path) -> None:
    """Raises UserError if libraries that read the file would take all memory or time, or read files
    elsewhere."""
    found = parse_object(read_file(file, max_bytes=_MAX_TEXT_BYTES)) or {}
    weights = found.get("weight_map")
    if isinstance(weights, dict) and len(weights) > _MOST_WEIGHTS:
        raise UserError(f"'{file}' is not that of a model: it names {len(weights):,} weights")
    for name in set(map(str, weights.values())) if isinstance(weights, dict) else ():
        if name != Path(name).name:
            raise UserError(f"'{file}' names weights of another folder: {name[:200]!r}")
    values = list(found.items())
    most = _LARGEST.get(file.name)
    while values:
        key, value = values.pop()
        if isinstance(value, dict | list):
            if len(value) > _MOST_ADDED and file.name != "config.json" and not weights:
                raise UserError(
                    f"'{file}' is not that of a model: its {key!r:.80} has {len(value):,} entries"
                )
            values += value.items() if isinstance(value, dict) else [(key, each) for each in value]
        elif isinstance(value, int) and most is not None and abs(value) > most.get(key, 2**63):
            raise UserError(
                f"'{file}' is not that of a model: its {key!r:.80} is more than "
                f"{most.get(key, 2**63):,}"
            )


def code_of(path: str | Path) -> list[str]:
    """The classes that `auto_map` lists in the files of a model's or tokenizer's folder, as
    `FILE.py:CLASS`; sorted.

    For a hub id, whose files are not yet known, the repository. Raises UserError as `resolve_path`
    does.
    """
    source = resolve_path(path)
    if not is_local(source):
        return [f"Python code of the hub's repository {source}"]
    found = {
        name for file in _NAMING for name in _texts(read_object(Path(source, file)).get("auto_map"))
    }
    shown = []
    for name in found:
        repository, _, reference = name.rpartition("--")
        module, _, attribute = reference.rpartition(".")
        file = f"{module}.py" if repository else f"{Path(source, module)}.py"
        shown.append(
            f"{file}:{attribute}" + (f" of the hub's repository {repository}" if repository else "")
        )
    return sorted(shown)


def _texts(value: object) -> Iterator[str]:
    """The strings of an entry: a str, or a list with gaps (a slow and a fast tokenizer)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
