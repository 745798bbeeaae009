"""Checks the files of a model's folder, finds Python code in it, which `transformers` runs if it is
trusted, and says what is wrong with a folder that cannot be loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distflow.errors import UserError
from distflow.models.model_paths import is_local, resolve_path, why_not_loaded
from distflow.observe.crash_safe_files import read_object, unreadable
from distflow.untrusted_files import check_file, check_tensors


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

        if runs_code or not is_local(resolved):
            code = []
        else:
            code = code_of(resolved)

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

    for file in Path(resolved).iterdir():  # links may lead elsewhere, e.g. into the hub's cache
        if file.suffix in (*_TEXTS, *_TENSORS) and not file.is_dir():
            _check_file_of_model(file)

    if any(any(Path(resolved).glob(pattern)) for pattern in patterns):
        return

    listed = "" if patterns == (what,) else f" ({', '.join(patterns)})"
    new = " (model.init=random makes new ones)" if what == "weights" else ""
    raise UserError(
        f"model folder '{resolved}' has no {what}{listed}: is it a complete model folder?{new}"
    )


def _check_file_of_model(file: Path) -> None:
    try:
        check_file(file, max_bytes=_MAX_TEXT_BYTES if file.suffix in _TEXTS else None)
        if file.suffix == ".safetensors":
            check_tensors(file)
        if file.name == _INDEX:
            _check_index(file)
    except OSError as error:
        raise unreadable(file, error) from error


_TEXTS = (".json", ".jinja", ".txt", ".model")
_TENSORS = (".safetensors", ".bin", ".gguf")
_MAX_TEXT_BYTES = 64 * 2**20
"""Twice the size of the largest published tokenizers."""

_NAMING = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
_INDEX = "model.safetensors.index.json"


def _check_index(file: Path) -> None:
    """Raises UserError if it names files elsewhere."""
    weights = read_object(file).get("weight_map")
    if isinstance(weights, dict):
        for name in set(map(str, weights.values())):
            if name != Path(name).name:
                raise UserError(f"'{file}' names weights of another folder: {name[:200]!r}")


def code_of(path: str | Path) -> list[str]:
    """The classes that `auto_map` lists in the files of a model's or tokenizer's folder, as
    `FILE.py:CLASS`; sorted.

    For a hub id, whose files are not yet known, the repository. Raises UserError as `resolve_path`
    does.
    """
    source = resolve_path(path)
    if not is_local(source):
        return [f"Python code of the hub's repository {source}"]

    found = set[str]()
    for file in _NAMING:
        found.update(_texts(read_object(Path(source, file)).get("auto_map")))

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
