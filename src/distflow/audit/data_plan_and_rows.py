"""Check: the data plan matches the config, and rows match their files, read again by code other
than the loader's."""

import csv
import json
import math
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from distflow.audit.check import Wrong, check
from distflow.audit.recorded_step import AuditedRun
from distflow.config import Config
from distflow.config.derived_settings import is_rl, reads_pairs, reward_functions
from distflow.config.keys.data import DataConfig
from distflow.data.encoded_prompts import PromptRow, PromptRows
from distflow.data.sources import BUILTIN_FOLDER
from distflow.models.image_inputs import images_of
from distflow.rewards.startup_checks import find_broken
from distflow.scheduling.data_plan import UNKNOWN_ROWS
from distflow.untrusted_files import matching_files

NUM_ROWS = 256
NUM_PROMPTS = 32
MOST_ROWS = 2**14
MOST_BYTES = 2**28
_ORIGIN = re.compile(r"(.+?)(?::|, row |, entry )(\d+)")


@check(
    "data",
    "prompt, response, turns, ground truth, domain, tag and extra info of some rows of the "
    "training and validation "
    "data equal those in their files, and each row of a file is either used or counted as excluded "
    "for its length "
    "or pass rate; with data.lazy the rows keep the order of the files; the data plan follows from "
    "the config",
    needs=(
        ".jsonl, .json, .csv and .parquet files, and built-in ones, up to 256 MiB; distflow train"
    ),
    limit=f"equal; {NUM_ROWS} rows per file, and the tokens of {NUM_PROMPTS} prompts",
)
def audit_data(run: AuditedRun) -> str | None:
    domains = run.spec.config.data.domains
    validation = run.spec.validation
    _check_plan(run)
    trained = [name for name, domain in domains.items() if domain.weight] or [""]
    unread = _audit_set(run, "train", trained, run.spec.rows)
    by_tags = [chosen for chosen in validation if domains and not domains[chosen.name].val_files]
    for sets in (by_tags, *([chosen] for chosen in validation if chosen not in by_tags)):
        rows = sets[0].rows if len(sets) == 1 else [row for chosen in sets for row in chosen.rows]
        unread |= _audit_set(run, "val", [chosen.name if domains else "" for chosen in sets], rows)
    return f"not read a second time: {', '.join(sorted(unread))}" if unread else None


def _check_plan(run: AuditedRun) -> None:
    spec = run.spec
    config = run.spec.config
    data = run.spec.config.data
    steps = config.trainer.total_training_steps
    generates = is_rl(config)
    num_groups = config.trainer.total_epochs * len(spec.rows)
    wanted: dict[str, Any] = {
        "shuffle": data.shuffle,
        "seed": data.seed if data.shuffle else 0,
        "consumer_batch": data.train_batch_size,
        "group_size": config.actor_rollout_ref.rollout.n if generates else 1 + reads_pairs(config),
        "max_concurrent": config.async_.max_concurrent_rollouts,
        # at most
        "max_staleness": min(
            spec.data.max_staleness, config.async_.max_staleness if generates else 0
        ),
        "total_steps": steps or math.ceil(num_groups / data.train_batch_size),
        "total_groups": None if steps or data.domains else num_groups,
        "domains": {name: (own.weight, own.n) for name, own in data.domains.items() if own.weight},
    }
    domains = {each.name: (each.weight, each.group_size) for each in spec.data.domains}
    for name, value in wanted.items():
        if (found := {**vars(spec.data), "domains": domains}[name]) != value:
            raise Wrong(
                f"{name} of the data plan is {found}, but according to the config it should be "
                f"{value}"
            )


def _audit_set(
    run: AuditedRun, split: str, domains: Sequence[str], rows: Sequence[PromptRow]
) -> set[str]:
    """Returns the sources that have no second reader. domains: those that share files by tags are
    passed together."""
    spec = run.spec
    read = cache(_read)
    num_rows = dict[str, int]()
    num_wanted = 0
    named = list[str]()
    data = spec.config.data
    tagged = [
        domain
        for domain in domains
        if domain and not getattr(data.domains[domain], f"{split}_files")
    ]
    domain_of_tag = {tag: domain for domain in tagged for tag in data.domains[domain].tags}
    streams = split == "train" and any(
        source.num_rows == UNKNOWN_ROWS for source in spec.data.sources
    )
    for domain in domains:
        owner = "" if domain in tagged else domain
        most = _setting(spec.config, domain, f"{split}_max_samples")
        files = _files(_setting(spec.config, owner, f"{split}_files"))
        named += files
        found = [read(_path(file)) for file in files if not streams and _is_readable(_path(file))]
        num_rows[owner] = num_own = sum(len(numbers) for numbers, _ in found)
        if domain in tagged:
            num_own = sum(
                domain_of_tag.get(_tag(data, get, n)) == domain
                for numbers, get in found
                for n in numbers
            )
        num_wanted += num_own if most < 0 else min(num_own, most)
    unread = {file for file in named if not _is_readable(_path(file))}
    names = ["train"] if split == "train" else [f"val {domain}" for domain in domains]
    num = len(rows) + sum(spec.num_left_out[name] for name in names)
    most = sum(num_rows.values())
    # more if bad rows are among the first
    if not streams and not unread and not num_wanted <= num <= most:
        raise Wrong(
            f"{num_wanted:,} rows of the {split}_files are wanted, but {len(rows):,} are used and "
            f"{num - len(rows):,} "
            "counted as left out: rows were lost or duplicated"
        )
    places = _first_rows(run) if streams else range(len(rows))
    drawn = random.Random(len(rows)).sample(places, min(NUM_ROWS * len(named), len(places)))
    usable = list(
        rows.some(drawn) if isinstance(rows, PromptRows) else (rows[index] for index in drawn)
    )
    if split == "train" and data.lazy:
        _check_order(run, usable, read)
    elif (
        split == "train"
        and num > len(rows)
        and not tagged
        and len(rows) <= MOST_ROWS
        and data.bad_rows == "error"
    ):
        used = [
            (Path(place[1]), int(place[2]))
            for row in rows
            if (place := _ORIGIN.fullmatch(row.origin))
        ]
        for domain in domains:
            _check_left_out(run, domain, set(used), read)
    for number_drawn, row in enumerate(usable):
        place = _ORIGIN.fullmatch(row.origin)
        if place is not None and _is_readable(path := Path(place[1])):
            get = read(path)[1]
            number = int(place[2])
            tag = _tag(data, get, number) if row.domain in tagged or split == "val" else ""
            if tag != row.tag:
                raise Wrong(f"the tag of {row.origin} is {row.tag!r}, but {tag!r} in the file")
            domain = domain_of_tag.get(tag, row.domain) if domains != [""] else ""
            _compare(run, row, get(number), domain)
            if (
                row.turns is None
                and row.rejected_ids is None
                and number_drawn < NUM_PROMPTS * len(named)
            ):
                _compare_prompt(run, row, get(number), domain)
            if row.rejected_ids is not None:
                _compare_pair(run, row)
            elif row.response_ids is not None:
                _compare_response(run, row, get(number))
    return unread


def _check_order(run: AuditedRun, rows: Sequence[PromptRow], read: Callable[[Path], Any]) -> None:
    """With `data.lazy` a row's number is its position in its files, which are read again when they
    end."""
    config = run.spec.config
    first = 0
    for source in run.spec.data.sources:
        tags = config.data.domains[source.name].tags if source.name else ()
        by_tags = tags and not config.data.domains[source.name].train_files
        paths = list(
            map(_path, _files(_setting(config, "" if by_tags else source.name, "train_files")))
        )
        own = range(first, first + source.num_rows)
        most = _setting(config, source.name, "train_max_samples")
        first += source.num_rows
        own_rows = [row for row in rows if row.index in own]
        order = list[tuple[Path, int]]()
        last = max((row.index for row in own_rows), default=first) - own.start
        for path in map(Path.resolve, paths if own_rows and all(map(_is_readable, paths)) else ()):
            if len(order) <= last:  # do not read files that are not due
                numbers, get = read(path)
                order += [
                    (path, n) for n in numbers if not by_tags or _tag(config.data, get, n) in tags
                ]
        order = order[: most if most >= 0 else None]
        for row in own_rows if order else []:
            place = _ORIGIN.fullmatch(row.origin)
            wanted = order[(row.index - own.start) % len(order)]
            if place is not None and (Path(place[1]).resolve(), int(place[2])) != wanted:
                by_order = f"row {wanted[1]} of {wanted[0]}"
                raise Wrong(
                    f"row {row.index} of the data is {row.origin}, but by the order of its files "
                    f"{by_order}"
                )


def _check_left_out(
    run: AuditedRun, domain: str, used: Collection[object], read: Callable[[Path], Any]
) -> None:
    """Check that unused rows have too many tokens, another pass rate, or tests that no response can
    pass."""
    config = run.spec.config
    functions = reward_functions(run.spec.config)
    paths = list(map(_path, _files(_setting(config, domain, "train_files"))))
    if (
        not is_rl(config)
        or _setting(config, domain, "train_max_samples") >= 0
        or not all(map(_is_readable, paths))
    ):
        return
    left = [(path, n) for path in paths for n in read(path)[0] if (path, n) not in used]
    low, high = _setting(config, domain, "pass_rate") or (-math.inf, math.inf)
    for path, n in random.Random(len(left)).sample(left, min(NUM_PROMPTS, len(left))):
        record = read(path)[1](n)
        rate = (
            float(_at(record, _setting(config, domain, "pass_rate_key")) or 0.0)
            if high < math.inf
            else 0.0
        )
        named = domain or str(_at(record, config.data.domain_key) or "default")
        parts = [part.name for part in functions.get(named) or functions.get("default", ())]
        extra = record | (inner if isinstance(inner := record.get("extra_info"), dict) else {})
        is_broken = find_broken(parts, _at(record, _setting(config, domain, "answer_key")), extra)
        encoded = _prompt_of(run, record, domain)
        if (
            encoded
            and low <= rate <= high
            and len(encoded[1]) <= config.data.max_prompt_length
            and not is_broken
        ):
            raise Wrong(
                f"row {n} of {path} is left out, but it is neither too long nor outside of "
                "data.pass_rate"
            )


def _first_rows(run: AuditedRun) -> list[int]:
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


def _compare(run: AuditedRun, row: PromptRow, record: Mapping[str, Any], domain: str) -> None:
    config = run.spec.config
    own = {
        name: _setting(config, domain, f"{name}_key")
        for name in ("prompt", "answer", "response", "messages")
    }
    named = domain or _at(record, config.data.domain_key)
    used = {*own.values(), "extra_info", *([] if domain else [config.data.domain_key])}
    used |= {config.data.image_key} if images_of(run.resources.tokenizer) else set()
    expected: dict[str, Any] = {"ground truth": _at(record, own["answer"])}
    expected["domain"] = "default" if named in (None, "") else str(named)
    expected |= {
        name: value for name, value in record.items() if name not in used and value is not None
    }
    expected |= inner if isinstance(inner := record.get("extra_info"), dict) else {}
    found = {"ground truth": row.ground_truth, "domain": row.domain, **(row.extra_info or {})}
    for name, value in expected.items():
        # dates, decimals and bytes, which the loader converts, are not compared
        with suppress(TypeError):
            if json.dumps(found.get(name), sort_keys=True) != json.dumps(value, sort_keys=True):
                raise Wrong(
                    f"{name} of {row.origin} is {found.get(name)!r:.80}, but {value!r:.80} in the "
                    "file"
                )


def _prompt_of(
    run: AuditedRun, record: Mapping[str, Any], domain: str
) -> tuple[str, list[int]] | None:
    """The prompt's text and tokens, uncut; None for messages with more than roles and texts."""
    config = run.spec.config
    tokenizer = run.resources.tokenizer
    own = {
        name: _setting(config, domain, name)
        for name in ("prompt_key", "prompt_format", "prompt_template")
    }
    asked = _at(record, own["prompt_key"])
    is_text = isinstance(asked, str) and own["prompt_format"] == "text"
    if isinstance(asked, str):
        text = (
            asked if own["prompt_template"] is None else own["prompt_template"].format(prompt=asked)
        )
        asked = [{"role": "user", "content": text}]
    if not is_text:
        if not isinstance(asked, list) or any(
            {*map(type, each.values())} != {str} or len(each) != 2 for each in asked
        ):
            return None
        system = _setting(config, domain, "system_prompt")
        first = (
            [{"role": "system", "content": system}]
            if system and asked[0]["role"] != "system"
            else []
        )
        options = {"enable_thinking": _setting(config, domain, "enable_thinking")}
        options |= config.data.apply_chat_template_kwargs | (
            record.get("chat_template_kwargs") or {}
        )
        tools = _at(record, config.data.tools_key) or None
        text = tokenizer.apply_chat_template(
            [*first, *asked], tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
    return text, list(tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"])


def _compare_prompt(
    run: AuditedRun, row: PromptRow, record: Mapping[str, Any], domain: str
) -> None:
    """Compare the prompt's text and tokens, cut if there are too many."""
    data = run.spec.config.data
    if row.images:
        _compare_images(row, _at(record, str(data.image_key)))
        return
    found = _prompt_of(run, record, domain)
    if found is None:
        return
    text, ids = found
    if len(ids) > data.max_prompt_length:
        most = data.max_prompt_length
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


def _compare_response(run: AuditedRun, row: PromptRow, record: Mapping[str, Any]) -> None:
    """For fine-tuning, compare the tokens of the text, or check that turns contain all that the
    assistant says."""
    tokenizer = run.resources.tokenizer
    data = run.spec.config.data
    ids = list(row.response_ids or ())
    response = _at(record, data.response_key)
    messages = _at(record, data.messages_key)
    if row.turns is None and isinstance(response, str):
        tokens = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
        if (
            ids not in (tokens, [*tokens, tokenizer.eos_token_id])
            and len(ids) < data.max_response_length
        ):
            raise Wrong(
                f"the response of {row.origin} is not the tokens of its text in the file, "
                f"{response!r:.80}"
            )
    messages = json.loads(messages) if isinstance(messages, str) else messages or ()
    said = [
        message.get("content") or "" for message in messages if message.get("role") == "assistant"
    ]
    ids = [*row.prompt_ids, *ids]
    before = 0
    same = len(said) == len(row.turns or ())
    for content, turn in zip(said, row.turns or (), strict=True) if same else ():
        start, end = (len(row.prompt_ids) + place for place in turn)
        whole, own = (tokenizer.decode(ids[place:end]) for place in (before, start))
        if content.strip() in whole and content.strip() not in own:
            raise Wrong(
                f"a turn of the assistant in {row.origin} is not trained on whole: {content!r:.80}"
            )
        before = end


def _compare_pair(run: AuditedRun, row: PromptRow) -> None:
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
    return (
        _at(inner, rest)
        if name not in record and rest and isinstance(inner, dict)
        else record.get(name)
    )


def _files(named: Sequence[str]) -> list[str]:
    """The files, with those of patterns in the order of their names."""
    return [each for file in named for each in (list(map(str, matching_files(file))) or [file])]


def _path(file: str) -> Path:
    builtin = file.removeprefix("builtin:")
    return Path(file).expanduser() if builtin == file else BUILTIN_FOLDER / f"{builtin}.jsonl"


def _read(path: Path) -> tuple[Sequence[int], Callable[[int], Any]]:
    """The row numbers in the file, as used in messages, and a function that returns a row by its
    number."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        return range(1, table.num_rows + 1), lambda number: table.slice(number - 1, 1).to_pylist()[
            0
        ]
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names, *rows = [(reader.line_num, values) for values in reader if values]
        lines = {
            line: {name: value for name, value in zip(names[1], own, strict=False) if value}
            for line, own in rows
        }
        return list(lines), lines.__getitem__
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if path.suffix.lower() == ".json" and content.lstrip().startswith(b"["):
        entries = json.loads(content)
        return range(1, len(entries) + 1), lambda number: entries[number - 1]
    texts = content.split(b"\n")
    return [
        number for number, text in enumerate(texts, 1) if text.strip()
    ], lambda number: json.loads(texts[number - 1])


def _is_readable(path: Path) -> bool:
    suffixes = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
    return path.suffix.lower() in suffixes and path.is_file() and path.stat().st_size <= MOST_BYTES
