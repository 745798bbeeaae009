"""From what `data.train_files` names to rows: files, data sets of Hugging Face `datasets`, built-in ones, Python."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from distflow.config.errors import UserError, missing_path
from distflow.config.paths import HUB_DATA
from distflow.data import iterators, reasoning_gym, verifiers_tasks
from distflow.data.files import READERS, read_file
from distflow.data.hub import unreachable
from distflow.data.rows import BadRows, Columns, RawRow, Record, read_rows

BUILTIN_FOLDER = Path(__file__).parent / "builtin"
_FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|.*\.py):[A-Za-z_]\w*")

Source = str | Path
Rows = Iterable[Mapping[str, object]]


def load_rows(
    sources: Source | Sequence[Source],
    columns: Columns,
    *,
    key: str = "data.train_files",
    bad_rows: str = "error",
    max_samples: int = -1,
    run_folder: Path | None = None,
    max_iterator_rows: int = iterators.MAX_ROWS,
) -> tuple[list[RawRow], BadRows]:
    """All good rows, in the order of the sources, and what was wrong with the others.

    sources: one or a list of
      - a `.jsonl`, `.json`, `.csv` or `.parquet` file;
      - a folder that `datasets` can read, or an id on the hub, with its configuration and split where there are
        several: `openai/gsm8k:main:train`, `folder::train`;
      - `builtin:NAME`, which ships with the package;
      - `reasoning-gym:NAME?size=100&seed=7`, which that package makes, `verifiers:ID`, a taskset of that package;
      - "module:function" or "file.py:function" that gives mappings.
    key: the config key that named them, for messages. bad_rows: "error" or "skip". max_samples: rows in all, -1 for
    all. run_folder: where the rows of Python code are kept; needed for them.
    Raises UserError for whatever cannot be read, for bad rows unless skipped, and for no rows at all.
    """
    bad = BadRows(bad_rows)
    rows: list[RawRow] = []
    listed = [sources] if isinstance(sources, str | Path) else sources
    for number, source in enumerate(listed):
        wanted = -1 if max_samples < 0 else max_samples - len(rows)
        if wanted == 0:
            break
        file = run_folder / "data" / f"{_kept_as(key)}-{number}.arrow" if run_folder is not None else None
        records = _records(source, key, file, max_iterator_rows, wanted)
        found = read_rows(records, columns, bad, f"'{source}'")
        rows.extend(found if wanted < 0 else islice(found, wanted))
    bad.check()
    if not rows:
        skipped = f" ({len(bad.reasons)} bad ones skipped, the first: {bad.reasons[0]})" if bad.reasons else ""
        named = ", ".join(f"'{source}'" for source in listed)
        raise UserError(f"{key}: no rows in {named or 'an empty list'}{skipped}")
    return rows, bad


def _kept_as(key: str) -> str:
    """`train_files`, or `NAME.train_files` of a domain."""
    return key.removeprefix("data.").removeprefix("domains.")


def forget_rows(run_folder: Path) -> None:
    """A run that starts anew asks Python code for its rows again: those that `load_rows` kept are removed."""
    for kept in (run_folder / "data").glob("*_files-*.arrow"):
        kept.unlink()


def is_function(source: str) -> bool:
    """Whether `load_rows` imports and calls what that names: it is no data set with a name of that form."""
    if source.startswith(("builtin:", verifiers_tasks.PREFIX)) or not _FUNCTION.fullmatch(source):
        return False
    return not (Path(source).expanduser().is_file() or Path(source.partition(":")[0]).expanduser().is_dir())


def _records(source: Source, key: str, kept: Path | None, max_rows: int, wanted: int) -> Iterator[Record]:
    text = str(source)
    if is_function(text):
        if kept is None:
            raise UserError(f"{key}: rows of a function need a run's folder (trainer.default_local_dir) to be kept in")
        return iterators.keep(text, kept, key=key, max_rows=max_rows, wanted=wanted)
    if text.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.read_records(text, key, wanted)
    if text.startswith(verifiers_tasks.PREFIX):
        return verifiers_tasks.read_records(text, key, wanted)
    if text.startswith("builtin:"):
        return read_file(_builtin(text.removeprefix("builtin:"), key), key)
    path = Path(text).expanduser()
    if path.is_file():
        return read_file(path, key)
    if Path(text.partition(":")[0]).expanduser().is_dir():
        return _hub_records(text, key)
    if HUB_DATA.fullmatch(text) and path.suffix.lower() not in READERS:
        return _hub_records(text, key)
    what, advice = missing_path(path)
    raise UserError(f"{key}: '{path}': {what}; {advice}")


def _builtin(name: str, key: str) -> Path:
    path = BUILTIN_FOLDER / f"{name}.jsonl"
    if not path.is_file():
        known = sorted(file.stem for file in BUILTIN_FOLDER.glob("*.jsonl"))
        raise UserError(f"{key}: there is no built-in data set '{name}'; there are: {', '.join(known) or 'none'}")
    return path


def _hub_records(name: str, key: str) -> Iterator[Record]:
    """A folder that `datasets` saved or can read, or an id on the hub, as `id:configuration:split`."""
    path, configuration, split = (*name.split(":"), "", "")[:3]
    folder = Path(path).expanduser()
    unreached = None if folder.is_dir() else unreachable()
    import datasets

    try:
        if any((folder / state).exists() for state in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(folder)
        elif folder.is_dir():
            datasets.disable_progress_bars()  # a download's are of use, those of reading files are not
            found = datasets.load_dataset(str(folder), configuration or None)
        else:
            found = datasets.load_dataset(path, configuration or None)
        rows = _split_of(found, path, split, key)
        for number, values in enumerate(rows, 1):
            yield Record(f"{name}, row {number}", values)
    except UserError:
        raise
    except Exception as error:  # the edge of a foreign library, which reads somebody's files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if unreached:
            reason = (
                f"there is no file or folder '{path}' in {Path.cwd()}, and the hub cannot be reached ({unreached}): "
                "write the path of a file, or see to the network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy)"
            )
        raise UserError(f"{key}: the data set '{name}' cannot be loaded: {reason}") from error


def _split_of(found: Rows | dict[str, Rows], name: str, split: str, key: str) -> Rows:
    if not isinstance(found, dict):
        return found
    if split in found or (not split and len(found) == 1):
        return found[split or next(iter(found))]
    raise UserError(f"{key}: '{name}' has the splits {', '.join(found)}: name one, e.g. {name}::{next(iter(found))}")
