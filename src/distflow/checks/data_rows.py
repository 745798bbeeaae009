"""Check: rows match their files, read again by code other than the loader's."""

import csv
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from distflow.checks.check import Wrong, check
from distflow.checks.recorded_step import CheckedRun
from distflow.config import Config
from distflow.config.keys.data import DataConfig
from distflow.data.encoded_prompts import PromptRow, PromptRows
from distflow.data.sources import BUILTIN_FOLDER
from distflow.models.image_inputs import images_of
from distflow.scheduling.data_plan import UNKNOWN_ROWS
from distflow.untrusted_files import matching_files

NUM_ROWS = 256
NUM_PROMPTS = 32
MOST_BYTES = 2**28
ORIGIN = re.compile(r"(.+?)(?::|, row |, entry )(\d+)")
"""Where a row is from: the file and the row's number in it, as messages have them."""

Numbered = tuple[Sequence[int], Callable[[int], Any]]
"""The row numbers in a file, as used in messages, and a function that returns a row by its
number."""


@check(
    "data",
    "prompt, response, turns, ground truth, domain, tag and extra info of some rows of the "
    "training and validation data equal those in their files, and each row of a file is either "
    "used or counted as excluded for its length or pass rate; with data.lazy the rows keep the "
    "order of the files",
    needs=".jsonl, .json, .csv and .parquet files, and built-in ones, up to 256 MiB; distflow "
    "train",
    limit=f"equal; {NUM_ROWS} rows per file, and the tokens of {NUM_PROMPTS} prompts",
)
def check_data(run: CheckedRun) -> str | None:
    domains = run.spec.config.data.domains
    validation = run.spec.validation
    trained = [name for name, domain in domains.items() if domain.weight] or [""]
    unread = _check_set(run, "train", trained, run.spec.rows)
    by_tags = [chosen for chosen in validation if domains and not domains[chosen.name].val_files]
    others = [[chosen] for chosen in validation if chosen not in by_tags]
    for sets in (by_tags, *others):
        rows = sets[0].rows if len(sets) == 1 else [row for chosen in sets for row in chosen.rows]
        names = [chosen.name if domains else "" for chosen in sets]
        unread |= _check_set(run, "val", names, rows)
    return f"not read a second time: {', '.join(sorted(unread))}" if unread else None


def _check_set(
    run: CheckedRun, split: str, domains: Sequence[str], rows: Sequence[PromptRow]
) -> set[str]:
    """Returns the sources that have no second reader. domains: those that share files by tags are
    passed together."""
    config = run.spec.config
    data = config.data
    read = cache(_read)
    streams = split == "train" and any(
        source.num_rows == UNKNOWN_ROWS for source in run.spec.data.sources
    )
    tagged = _tagged(data, split, domains)
    domain_of_tag = {tag: domain for domain in tagged for tag in data.domains[domain].tags}
    files = {domain: _files_of(config, split, domain, domain in tagged) for domain in domains}
    named = [file for domain in domains for file in files[domain]]
    unread = {str(file) for file in named if not _is_readable(file)}
    if not streams and not unread:
        _check_numbers(run, split, files, rows, domain_of_tag, read)
    places = _first_rows(run) if streams else range(len(rows))
    drawn = random.Random(len(rows)).sample(places, min(NUM_ROWS * len(named), len(places)))
    usable = list(
        rows.some(drawn) if isinstance(rows, PromptRows) else (rows[index] for index in drawn)
    )
    for number, row in enumerate(usable):
        place = ORIGIN.fullmatch(row.origin)
        if place is None or not _is_readable(Path(place[1])):
            continue
        get = read(Path(place[1]))[1]
        line = int(place[2])
        tag = _tag(data, get, line) if row.domain in tagged or split == "val" else ""
        if tag != row.tag:
            raise Wrong(f"the tag of {row.origin} is {row.tag!r}, but {tag!r} in the file")
        domain = domain_of_tag.get(tag, row.domain) if domains != [""] else ""
        _check_row(run, row, get(line), domain, number < NUM_PROMPTS * len(named))
    if split == "train" and data.lazy:
        _check_order(run, usable, read)
    return unread


def _tagged(data: DataConfig, split: str, domains: Sequence[str]) -> list[str]:
    """Domains that have no files of their own, but a part of the common ones by their tags."""
    return [
        domain
        for domain in domains
        if domain and not getattr(data.domains[domain], f"{split}_files")
    ]


def _files_of(config: Config, split: str, domain: str, by_tags: bool) -> list[Path]:
    """The domain's files, with those of patterns in the order of their names."""
    found = list[Path]()
    for file in _setting(config, "" if by_tags else domain, f"{split}_files"):
        matching = list(map(str, matching_files(file)))
        found += map(_path, matching or [file])
    return found


def _check_numbers(
    run: CheckedRun,
    split: str,
    files: Mapping[str, Sequence[Path]],
    rows: Sequence[PromptRow],
    domain_of_tag: Mapping[str, str],
    read: Callable[[Path], Numbered],
) -> None:
    """Each row of a file is used, or counted as left out; only rows of the files are."""
    data = run.spec.config.data
    num_wanted = 0
    of_files = dict[tuple[Path, ...], int]()
    for domain, own in files.items():
        numbers = [(get, n) for path in own for get, n in _rows_of(read(path))]
        of_files[tuple(own)] = len(numbers)
        count = len(numbers)
        if domain in domain_of_tag.values():
            tags = [_tag(data, get, n) for get, n in numbers]
            count = sum(domain_of_tag.get(tag) == domain for tag in tags)
        most = _setting(run.spec.config, domain, f"{split}_max_samples")
        num_wanted += count if most < 0 else min(count, most)
    names = ["train"] if split == "train" else [f"val {domain}" for domain in files]
    num_left_out = sum(run.spec.num_left_out[name] for name in names)
    # more if bad rows are among the first
    if not num_wanted <= len(rows) + num_left_out <= sum(of_files.values()):
        raise Wrong(
            f"{num_wanted:,} rows of the {split}_files are wanted, but {len(rows):,} are used and "
            f"{num_left_out:,} counted as left out: rows were lost or duplicated"
        )


def _rows_of(found: Numbered) -> list[tuple[Callable[[int], Any], int]]:
    numbers, get = found
    return [(get, number) for number in numbers]


def _check_order(
    run: CheckedRun, rows: Sequence[PromptRow], read: Callable[[Path], Numbered]
) -> None:
    """With `data.lazy` a row's number is its position in its files, which are read again when they
    end."""
    config = run.spec.config
    first = 0
    for source in run.spec.data.sources:
        own = [row for row in rows if first <= row.index < first + source.num_rows]
        start = first
        first += source.num_rows
        by_tags = bool(_tagged(config.data, "train", [source.name]))
        paths = _files_of(config, "train", source.name, by_tags)
        if not own or not all(map(_is_readable, paths)):
            continue
        tags = config.data.domains[source.name].tags if by_tags else ()
        last = max(row.index for row in own) - start
        order = list[tuple[Path, int]]()
        for path in paths:
            if len(order) > last:  # do not read files that are not due
                break
            numbers, get = read(path.resolve())
            order += [
                (path.resolve(), n)
                for n in numbers
                if not tags or _tag(config.data, get, n) in tags
            ]
        most = _setting(config, source.name, "train_max_samples")
        order = order[: most if most >= 0 else None]
        for row in own:
            place = ORIGIN.fullmatch(row.origin)
            path, number = order[(row.index - start) % len(order)]
            if place is not None and (Path(place[1]).resolve(), int(place[2])) != (path, number):
                raise Wrong(
                    f"row {row.index} of the data is {row.origin}, but by the order of its files "
                    f"row {number} of {path}"
                )


def _first_rows(run: CheckedRun) -> list[int]:
    """The first rows of each source if some have an unknown number of rows."""
    found = list[int]()
    first = 0
    for source in run.spec.data.sources:
        found += range(first, first + min(source.num_rows, NUM_ROWS))
        first += source.num_rows
    return found


def _tag(data: DataConfig, get: Callable[[int], Any], number: int) -> str:
    """The tag of a row by its number; empty for an unreadable row."""
    try:
        return "" if data.tag_key is None else str(_at(get(number), data.tag_key))
    except (ValueError, AttributeError):
        return ""


def _check_row(
    run: CheckedRun, row: PromptRow, record: Mapping[str, Any], domain: str, tokens_too: bool
) -> None:
    _compare_values(run, row, record, domain)
    is_prompt = row.turns is None and row.rejected_ids is None
    if is_prompt and tokens_too:
        if row.images:
            _compare_images(row, _at(record, str(run.spec.config.data.image_key)))
        else:
            _compare_prompt(run, row, record, domain)
    if row.rejected_ids is not None:
        _compare_pair(run, row)
    elif row.response_ids is not None:
        _compare_response(run, row, record)


def _compare_values(
    run: CheckedRun, row: PromptRow, record: Mapping[str, Any], domain: str
) -> None:
    config = run.spec.config
    names = ("prompt", "answer", "response", "messages")
    keys = {name: _setting(config, domain, f"{name}_key") for name in names}
    used = {*keys.values(), "extra_info"}
    if not domain:
        used.add(config.data.domain_key)
    if images_of(run.resources.tokenizer):
        used.add(config.data.image_key)
    named = domain or _at(record, config.data.domain_key)
    expected: dict[str, Any] = {"ground truth": _at(record, keys["answer"])}
    expected["domain"] = "default" if named in (None, "") else str(named)
    for name, value in record.items():
        if name not in used and value is not None:
            expected[name] = value
    inner = record.get("extra_info")
    expected |= inner if isinstance(inner, dict) else {}
    found = {"ground truth": row.ground_truth, "domain": row.domain, **(row.extra_info or {})}
    for name, value in expected.items():
        # dates, decimals and bytes, which the loader converts, are not compared
        with suppress(TypeError):
            if json.dumps(found.get(name), sort_keys=True) != json.dumps(value, sort_keys=True):
                raise Wrong(
                    f"{name} of {row.origin} is {found.get(name)!r:.80}, but {value!r:.80} in the "
                    "file"
                )


def _compare_prompt(
    run: CheckedRun, row: PromptRow, record: Mapping[str, Any], domain: str
) -> None:
    """Compare the prompt's text and tokens, cut if there are too many."""
    found = _prompt_of(run, record, domain)
    if found is None:
        return
    data = run.spec.config.data
    text, ids = found
    most = data.max_prompt_length
    if len(ids) > most:
        head = {"left": 0, "middle": most // 2, "right": most}[data.truncation]
        ids = [*ids[:head], *ids[len(ids) - most + head :]]
    elif row.prompt_text != text:
        raise Wrong(
            f"the prompt of {row.origin} is {row.prompt_text!r:.80}, but {text!r:.80} by the file"
        )
    if list(row.prompt_ids) != ids:
        raise Wrong(
            f"the prompt of {row.origin} has the tokens {list(row.prompt_ids)!s:.80}, not "
            f"{ids!s:.80}"
        )


def _prompt_of(
    run: CheckedRun, record: Mapping[str, Any], domain: str
) -> tuple[str, list[int]] | None:
    """The prompt's text and tokens, uncut; None for messages with more than roles and texts."""
    config = run.spec.config
    tokenizer = run.resources.tokenizer
    asked = _at(record, _setting(config, domain, "prompt_key"))
    is_text = isinstance(asked, str) and _setting(config, domain, "prompt_format") == "text"
    text: Any = asked
    if not is_text:
        template = _setting(config, domain, "prompt_template")
        if isinstance(asked, str):
            content = asked if template is None else template.format(prompt=asked)
            asked = [{"role": "user", "content": content}]
        if not isinstance(asked, list) or not all(map(_is_plain, asked)):
            return None
        system = _setting(config, domain, "system_prompt")
        if system and asked[0]["role"] != "system":
            asked = [{"role": "system", "content": system}, *asked]
        options = {"enable_thinking": _setting(config, domain, "enable_thinking")}
        options |= config.data.apply_chat_template_kwargs
        options |= record.get("chat_template_kwargs") or {}
        tools = _at(record, config.data.tools_key) or None
        text = tokenizer.apply_chat_template(
            asked, tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
    elif _setting(config, domain, "prompt_template") is not None:
        text = _setting(config, domain, "prompt_template").format(prompt=asked)
    return text, list(tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"])


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Whether a message has a role and a text, and nothing else."""
    return len(message) == 2 and {*map(type, message.values())} == {str}


def _compare_images(row: PromptRow, given: object) -> None:
    """Compare the number of images, and the pixels of those that the row holds as bytes."""
    from PIL import Image

    listed = given if isinstance(given, list) else [given]
    if len(listed) != len(row.images):
        raise Wrong(f"{row.origin} has {len(row.images)} images, and {len(listed)} in the file")
    for path, value in zip(row.images, listed, strict=True):
        content = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(content, bytes):
            with Image.open(BytesIO(content)) as there, Image.open(path) as here:
                if there.convert("RGB").tobytes() != here.tobytes():
                    raise Wrong(f"an image of {row.origin} has other pixels than in the file")


def _compare_response(run: CheckedRun, row: PromptRow, record: Mapping[str, Any]) -> None:
    """For fine-tuning, compare the tokens of the text, or check that turns contain all that the
    assistant says."""
    tokenizer = run.resources.tokenizer
    data = run.spec.config.data
    ids = list(row.response_ids or ())
    response = _at(record, data.response_key)
    if row.turns is None and isinstance(response, str):
        tokens = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
        is_whole = len(ids) < data.max_response_length
        if is_whole and ids not in (tokens, [*tokens, tokenizer.eos_token_id]):
            raise Wrong(
                f"the response of {row.origin} is not the tokens of its text in the file, "
                f"{response!r:.80}"
            )
    messages = _at(record, data.messages_key) or ()
    messages = json.loads(messages) if isinstance(messages, str) else messages
    said = list[str]()
    for message in messages:
        if message.get("role") == "assistant":
            said.append(message.get("content") or "")
    if len(said) != len(row.turns or ()):
        return
    ids = [*row.prompt_ids, *ids]
    before = 0
    for content, turn in zip(said, row.turns or (), strict=True):
        start, end = (len(row.prompt_ids) + place for place in turn)
        whole = tokenizer.decode(ids[before:end])
        own = tokenizer.decode(ids[start:end])
        if content.strip() in whole and content.strip() not in own:
            raise Wrong(
                f"a turn of the assistant in {row.origin} is not trained on whole: {content!r:.80}"
            )
        before = end


def _compare_pair(run: CheckedRun, row: PromptRow) -> None:
    """Check that each text of the pair contains its response, which was compared with the file."""
    data = run.spec.config.data
    extra = dict[str, Any](row.extra_info or {})
    for name, ids in ((data.chosen_key, row.response_ids), (data.rejected_key, row.rejected_ids)):
        found = extra[name][-1]["content"] if isinstance(extra[name], list) else extra[name]
        text = run.resources.tokenizer.decode([*row.prompt_ids, *(ids or ())])
        if found.strip() not in text:
            raise Wrong(
                f"the text of '{name}' in {row.origin} is {text!r:.80}, without {found!r:.80} of "
                "the file"
            )


def _setting(config: Config, domain: str, name: str) -> Any:
    value = getattr(config.data.domains[domain], name) if domain else None
    return getattr(config.data, name) if value is None else value


def _at(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column; a dotted name that is not a column is a path."""
    first, _, rest = name.partition(".")
    inner = record.get(name, record.get(first))
    if name not in record and rest and isinstance(inner, dict):
        return _at(inner, rest)
    return record.get(name)


def _path(file: str) -> Path:
    builtin = file.removeprefix("builtin:")
    return Path(file).expanduser() if builtin == file else BUILTIN_FOLDER / f"{builtin}.jsonl"


def _read(path: Path) -> Numbered:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        numbers = range(1, table.num_rows + 1)
        return numbers, lambda number: table.slice(number - 1, 1).to_pylist()[0]
    if suffix == ".csv":
        return _read_csv(path)
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if suffix == ".json" and content.lstrip().startswith(b"["):
        entries = json.loads(content)
        return range(1, len(entries) + 1), lambda number: entries[number - 1]
    texts = content.split(b"\n")
    filled = [number for number, text in enumerate(texts, 1) if text.strip()]
    return filled, lambda number: json.loads(texts[number - 1])


def _read_csv(path: Path) -> Numbered:
    lines = dict[int, dict[str, str]]()
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        names: list[str] = []
        for values in reader:
            if not values:
                continue
            if not names:
                names = values
                continue
            pairs = zip(names, values, strict=False)
            lines[reader.line_num] = {name: value for name, value in pairs if value}
    return list(lines), lines.__getitem__


def _is_readable(path: Path) -> bool:
    suffixes = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
    return path.suffix.lower() in suffixes and path.is_file() and path.stat().st_size <= MOST_BYTES
