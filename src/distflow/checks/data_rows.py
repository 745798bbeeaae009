"""Check: rows are those of their files, read again from the line that each is said to be from."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from distflow.checks.check import Wrong, check
from distflow.checks.recorded_step import CheckedRun
from distflow.config import Config
from distflow.config.derived_settings import reads_labels
from distflow.data.dataset_columns import find
from distflow.data.encoded_prompts import PromptRow, PromptRows
from distflow.untrusted_files import matching_files

NUM_ROWS = 256
MOST_BYTES = 2**28
ORIGIN = re.compile(r"(.+?)(?::|, row )(\d+)")
"""Where a row is from: the file and the row's number in it, as messages have them."""


@check(
    "data",
    "prompts, ground truths and responses of some rows are those of their lines in the files, and "
    "no line is used twice",
    needs=".jsonl and .parquet files, and built-in ones, up to 256 MiB; distflow train",
    limit=f"equal, {NUM_ROWS} rows of each set; of a prompt, the texts that it contains",
)
def check_data(run: CheckedRun) -> str | None:
    read = cache(_read)
    named = _named_files(run.spec.config)
    is_lazy = run.spec.config.data.lazy
    sets = [run.spec.rows, *(chosen.rows for chosen in run.spec.validation)]

    unread = set[str]()
    for rows in sets:
        used = set[tuple[object, ...]]()
        for row in _some(rows, is_lazy):
            place = ORIGIN.fullmatch(row.origin)
            file = Path(place[1]) if place else None

            # a conversation may give several texts, and a stream begins again
            may_repeat = row.turns is not None or is_lazy or not row.origin
            if file is not None and named[file.stem] > 1:
                may_repeat = True
            use = (row.origin, row.response_ids)
            if use in used and not may_repeat:
                raise Wrong(f"{row.origin} is used twice: rows were duplicated")

            used.add(use)
            if place is None or file is None:
                continue

            if _is_readable(file):
                row_of_file = read(file)(int(place[2]))
                _check_row(run, row, row_of_file)
            else:
                unread.add(place[1])

    if unread:
        return f"not read a second time: {', '.join(sorted(unread))}"
    return None


def _named_files(config: Config) -> Counter[str]:
    """How often the config names each file for training, or for validation, by the file's name
    without its ending."""
    found = Counter[str]()
    for key in ("train_files", "val_files"):
        own = Counter[str]()
        for part in (config.data, *config.data.domains.values()):
            for source in getattr(part, key) or ():
                for path in matching_files(source) or [Path(source.removeprefix("builtin:"))]:
                    own[path.stem] += 1
        found |= own

    return found


def _some(rows: Sequence[PromptRow], is_lazy: bool) -> list[PromptRow]:
    """Rows at random places; the first ones if all before them would be read as well."""
    number = min(len(rows), NUM_ROWS)
    places: Sequence[int] = range(number)
    if not is_lazy:
        places = random.Random(len(rows)).sample(range(len(rows)), number)
    if isinstance(rows, PromptRows):
        return list(rows.some(places))
    return [rows[place] for place in places]


def _check_row(run: CheckedRun, row: PromptRow, record: Mapping[str, Any]) -> None:
    config = run.spec.config
    wanted = find(record, _setting(config, row.domain, "answer_key"))

    # dates and decimals, which the loader converts, are not compared
    wanted_text = json.dumps(wanted, sort_keys=True, default=lambda _: row.ground_truth)
    if json.dumps(row.ground_truth, sort_keys=True) != wanted_text:
        raise Wrong(
            f"ground truth of {row.origin} is {row.ground_truth!r:.80}, but {wanted!r:.80} in the "
            "file"
        )

    asked = find(record, _setting(config, row.domain, "prompt_key"))
    texts = [asked] if isinstance(asked, str) else _said(asked, "user")
    is_cut = len(row.prompt_ids) >= config.data.max_prompt_length
    if is_cut or row.images or row.turns is not None:
        texts = []

    for text in texts:
        if "".join(text.split()) not in "".join(row.prompt_text.split()):
            raise Wrong(
                f"the prompt of {row.origin} is {row.prompt_text!r:.80}, without {text!r:.80} of "
                "the file"
            )

    label = find(record, config.data.label_key)
    if reads_labels(config) and find(record, config.data.chosen_key) is None:
        own = (row.extra_info or {}).get(config.data.label_key)
        if own != label:
            raise Wrong(f"the label of {row.origin} is {own}, but {label} in the file")

    if row.response_ids is not None and row.rejected_ids is None:
        _check_response(run, row, record)


def _check_response(run: CheckedRun, row: PromptRow, record: Mapping[str, Any]) -> None:
    """For fine-tuning: the tokens are those of the text, and turns contain all that the assistant
    says."""
    tokenizer = run.resources.tokenizer
    data = run.spec.config.data
    ids = list(row.response_ids or ())

    response = find(record, data.response_key)
    if row.turns is None and isinstance(response, str):
        tokens = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
        is_whole = len(ids) < data.max_response_length
        if is_whole and ids not in (tokens, [*tokens, tokenizer.eos_token_id]):
            raise Wrong(
                f"the response of {row.origin} is not the tokens of its text in the file, "
                f"{response!r:.80}"
            )

    messages = find(record, data.messages_key) or ()
    said = _said(json.loads(messages) if isinstance(messages, str) else messages, "assistant")
    if len(said) != len(row.turns or ()):
        return

    before = 0
    for content, (start, end) in zip(said, row.turns or (), strict=True):
        whole = tokenizer.decode(ids[before:end])
        if content.strip() in whole and content.strip() not in tokenizer.decode(ids[start:end]):
            raise Wrong(
                f"a turn of the assistant in {row.origin} is not trained on whole: {content!r:.80}"
            )
        before = end


def _said(messages: object, role: str) -> list[str]:
    """The texts of the messages with this role."""
    found = list[str]()
    for message in messages if isinstance(messages, list) else ():
        content = None
        if isinstance(message, Mapping):
            content = message.get("content")
        if isinstance(content, str) and message.get("role") == role:
            found.append(content)

    return found


def _setting(config: Config, domain: str, name: str) -> Any:
    own = config.data.domains.get(domain)
    value = getattr(own, name, None)
    return getattr(config.data, name) if value is None else value


def _read(path: Path) -> Callable[[int], Mapping[str, Any]]:
    """Returns a row of the file by its number, from 1."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        return lambda number: table.slice(number - 1, 1).to_pylist()[0]

    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lambda number: json.loads(lines[number - 1])


def _is_readable(path: Path) -> bool:
    is_known = path.suffix in (".jsonl", ".parquet")
    return is_known and path.is_file() and path.stat().st_size <= MOST_BYTES
