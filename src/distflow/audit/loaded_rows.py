"""Check: the rows of a run are those of their files, which are read a second time, by other code than the loader's."""

import csv
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from distflow.audit.recorded_data import Wrong, check
from distflow.config import Config
from distflow.data.prompts import PromptRow
from distflow.data.sources import BUILTIN_FOLDER
from distflow.runtime.spec import Spec

NUM_ROWS, MOST_BYTES = 8, 2**28
_ORIGIN = re.compile(r"(.+?)(?::|, row |, entry )(\d+)")


@check(
    "data",
    "prompt, ground truth, domain and extra info of some rows of the training and validation data are those of their "
    "files, and each row of a file is used or counted as left out",
    needs=".jsonl, .json, .csv and .parquet files, and built-in ones, up to 256 MiB; distflow train",
    limit=f"equal, {NUM_ROWS} rows a file",
)
def audit_data(spec: Spec) -> str | None:
    data, unread = spec.config.data, set[str]()
    trained = [name for name, domain in data.domains.items() if domain.weight] or [""]
    unread |= _audit_set(spec, "train", trained, spec.rows)
    for chosen in spec.validation:
        unread |= _audit_set(spec, "val", ["" if data.val_files else chosen.name], chosen.rows)
    return f"not read a second time: {', '.join(sorted(unread))}" if unread else None


def _audit_set(spec: Spec, split: str, domains: Sequence[str], rows: Sequence[PromptRow]) -> set[str]:
    """Returns the sources that have no second reader."""
    read, unread, num_rows, num_wanted, num_files = cache(_read), set[str](), 0, 0, 0
    for domain in domains:
        files, most = (_setting(spec.config, domain, f"{split}_{name}") for name in ("files", "max_samples"))
        unread |= {file for file in files if not _is_readable(_path(file))}
        own = sum(read(_path(file))[0] for file in files if file not in unread)
        num_rows, num_wanted = num_rows + own, num_wanted + (own if most < 0 else min(own, most))
        num_files += len(files)
    num_left_out = spec.num_left_out[split if split == "train" else f"val {domains[0]}"]
    if not unread and not num_wanted <= len(rows) + num_left_out <= num_rows:  # more if bad ones are among the first
        raise Wrong(
            f"{num_wanted:,} rows of the {split}_files are wanted, but {len(rows):,} are used and {num_left_out:,} "
            "counted as left out: rows were lost, or are there twice"
        )
    for index in random.Random(len(rows)).sample(range(len(rows)), min(NUM_ROWS * num_files, len(rows))):
        place = _ORIGIN.fullmatch(rows[index].origin)
        if place is not None and _is_readable(path := Path(place[1])):
            _compare(spec.config, rows[index], read(path)[1](int(place[2])), domains)
    return unread


def _compare(config: Config, row: PromptRow, record: Mapping[str, Any], domains: Sequence[str]) -> None:
    domain = row.domain if domains != [""] else ""
    own = {name: _setting(config, domain, f"{name}_key") for name in ("prompt", "answer", "response", "messages")}
    named = domain or _at(record, config.data.domain_key)
    used = {*own.values(), "extra_info", *([] if domain else [config.data.domain_key])}
    expected: dict[str, Any] = {"ground truth": _at(record, own["answer"])}
    expected["domain"] = "default" if named in (None, "") else str(named)
    expected |= {name: value for name, value in record.items() if name not in used and value is not None}
    expected |= inner if isinstance(inner := record.get("extra_info"), dict) else {}
    found = {"ground truth": row.ground_truth, "domain": row.domain, **(row.extra_info or {})}
    for name, value in expected.items():
        if _is_plain(value) and json.dumps(found.get(name), sort_keys=True) != json.dumps(value, sort_keys=True):
            raise Wrong(f"{name} of {row.origin} is {found.get(name)!r:.80}, but {value!r:.80} in the file")
    prompt, template = _at(record, own["prompt"]), _setting(config, domain, "prompt_template")
    if isinstance(prompt, list):  # a chat template writes the messages
        prompt = next((each.get("content") for each in reversed(prompt) if each.get("role") == "user"), None)
    is_cut = not config.data.filter_overlong_prompts and len(row.prompt_ids) >= config.data.max_prompt_length
    if isinstance(prompt, str) and not is_cut and row.turns is None:
        text = prompt if template is None else template.format(prompt=prompt)
        is_whole = isinstance(_at(record, own["prompt"]), str) and _setting(config, domain, "prompt_format") == "text"
        if row.prompt_text != text if is_whole else prompt.strip() not in row.prompt_text:
            raise Wrong(f"the prompt of {row.origin} is {row.prompt_text!r:.80}, but {text!r:.80} in the file")


def _setting(config: Config, domain: str, name: str) -> Any:
    value = getattr(config.data.domains[domain], name) if domain else None
    return getattr(config.data, name) if value is None else value


def _at(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column; a dotted name that is none is a path."""
    first, _, rest = name.partition(".")
    inner = record.get(name, record.get(first))
    return _at(inner, rest) if name not in record and rest and isinstance(inner, dict) else record.get(name)


def _is_plain(value: object) -> bool:
    """Dates, decimals and bytes, which the loader converts, are not compared."""
    try:
        return bool(json.dumps(value))
    except TypeError:
        return False


def _path(file: str) -> Path:
    builtin = file.removeprefix("builtin:")
    return Path(file).expanduser() if builtin == file else BUILTIN_FOLDER / f"{builtin}.jsonl"


def _read(path: Path) -> tuple[int, Callable[[int], Any]]:
    """The number of rows, and a function that gives one by its number in the file, as messages name it."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        return table.num_rows, lambda number: table.slice(number - 1, 1).to_pylist()[0]
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names, *rows = [(reader.line_num, values) for values in reader if values]
        lines = {line: {name: value for name, value in zip(names[1], own, strict=False) if value} for line, own in rows}
        return len(rows), lines.__getitem__
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix.lower() == ".json" and content.lstrip().startswith(b"["):
        entries = json.loads(content)
        return len(entries), lambda number: entries[number - 1]
    texts = content.split(b"\n")
    return sum(bool(text.strip()) for text in texts), lambda number: json.loads(texts[number - 1])


def _is_readable(path: Path) -> bool:
    suffixes = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
    return path.suffix.lower() in suffixes and path.is_file() and path.stat().st_size <= MOST_BYTES
