"""Rows of a data set before tokenisation: the meaning of columns, and bad rows."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from pathlib import Path

from distflow.data import messages as chat_messages
from distflow.data.images import place_images, read_images
from distflow.errors import UserError, nearest
from distflow.observe.crash_safe_files import JSON, is_deep

DEFAULT_DOMAIN = "default"
_DEFAULT_DOMAIN_KEY = "data_source"
_MAX_SHOWN = 5
_USUAL_NAMES = {
    "data.prompt_key": ("question", "problem", "instruction", "query", "messages", "input", "text"),
    "data.answer_key": (
        "ground_truth",
        "reward_model.ground_truth",
        "solution",
        "label",
        "target",
        "final_answer",
    ),
    "data.response_key": ("completion", "output", "answer", "target", "chosen"),
    "data.pass_rate_key": ("pass_rate", "difficulty", "solve_rate", "accuracy", "success_rate"),
    "data.messages_key": ("conversations", "conversation", "dialog", "chat"),
    "data.tag_key": ("tag", "tags", "data_source", "source", "subset", "category"),
}
"""Usual names of these columns in data sets."""

TEMPLATE_KWARGS_COLUMN = "chat_template_kwargs"


@dataclass(frozen=True)
class Columns:
    """Names of the columns. A dotted name reaches into nested values: `reward_model.ground_truth`.

    answer_required: rows without an answer are bad. domain: may be missing if it has its default
    name; None if all rows are of `only_domain`. group: of the config keys that name the columns,
    for messages. pass_rate: a number that every row must have, or None. response: the column to
    learn from (SFT), or None. messages: conversations to learn from, if a row has no prompt and
    response; or None. tools: functions for the chat template. is_chat: texts go through it too.
    tag: a column that every row must have, or None. domain_of_tag: unless empty, rows of domains
    other than `only_domain` are skipped. images: a column of images, which are kept in the folder
    `store`; or None.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    domain: str | None = _DEFAULT_DOMAIN_KEY
    response: str | None = None
    answer_required: bool = True
    messages: str | None = None
    tools: str = "tools"
    is_chat: bool = False
    only_domain: str = DEFAULT_DOMAIN
    group: str = "data"
    pass_rate: str | None = None
    tag: str | None = None
    domain_of_tag: Mapping[str, str] = field(default_factory=dict)
    images: str | None = None
    store: Path = Path()


@dataclass(frozen=True)
class Record:
    """One row as read. `bad` says why it cannot be read; `values` is then empty."""

    origin: str
    values: Mapping[str, object] = field(default_factory=dict)
    bad: str | None = None


@dataclass(frozen=True)
class RawRow:
    """A good row. `origin` is its file and line.

    tools, template_kwargs: for the chat template. is_conversation: whether to train on the
    assistant's turns in `prompt`. pass_rate: None if it is not used.
    """

    origin: str
    prompt: str | chat_messages.Messages
    answer: JSON
    domain: str
    response: str | None
    extra_info: dict[str, JSON]
    tools: list[JSON] = field(default_factory=list)
    template_kwargs: dict[str, JSON] = field(default_factory=dict)
    is_conversation: bool = False
    pass_rate: float | None = None
    tag: str = ""
    images: tuple[str, ...] = ()


@dataclass
class BadRows:
    """Bad rows: collects them to report all together, or counts and skips them.

    policy: "error" or "skip" (data.bad_rows). broken: readable rows that are omitted because no
    response to them could be scored.
    """

    policy: str = "error"
    reasons: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, origin: str, reason: str) -> None:
        self.reasons.append(f"{origin}: {reason}")

    def check(self) -> None:
        """Raises UserError naming the first bad rows, unless they are to be skipped."""
        if not self.reasons or self.policy == "skip":
            return
        raise UserError(
            f"{listed(self.reasons, 'bad row')}\n"
            "repair the data, or exclude such rows with data.bad_rows=skip"
        )


def listed(reasons: Sequence[str], what: str, which: str = "") -> str:
    """The number of such rows, and the first of them with the reason, one per line."""
    shown = "".join(f"\n  {reason}" for reason in reasons[:_MAX_SHOWN])
    more = f"\n  and {len(reasons) - _MAX_SHOWN} more" if len(reasons) > _MAX_SHOWN else ""
    return (
        f"{len(reasons)} "
        f"{what}{'s' if len(reasons) > 1 else ''}{' ' if which else ''}{which}:{shown}{more}"
    )


def read_rows(
    records: Iterator[Record], columns: Columns, bad: BadRows, source: str | None
) -> Iterator[RawRow]:
    """The good rows of one source, None for some rows of one; the bad ones go to `bad`.

    Raises UserError if no row of a source has a required column: the prompt's, and others by
    `columns`.
    """
    seen: set[str] = set()
    missing = _required(columns)
    num_read = 0
    only: Iterable[object] = ()
    for record in records:
        fault = record.bad or ("nested too deeply" if is_deep(dict(record.values)) else None)
        if fault is not None:
            bad.add(record.origin, fault)
            continue
        seen.update(record.values)
        only = record.values.values()
        if columns.tag is not None and find(record.values, columns.tag) is not None:
            missing.pop("data.tag_key", None)
        try:
            tag = _tag(record.values, columns)
        except chat_messages.RowError as error:
            bad.add(record.origin, str(error))
            continue
        if columns.domain_of_tag.get(tag, columns.only_domain) != columns.only_domain:
            continue
        num_read += 1
        found = {name for name in missing.values() if find(record.values, name) is not None}
        if _is_conversation(record.values, columns):
            found |= {columns.prompt, str(columns.response)}
        missing = {key: name for key, name in missing.items() if name not in found}
        try:
            row = _raw_row(record, columns, tag)
        except chat_messages.RowError as error:
            bad.add(record.origin, str(error))
            continue
        yield row
    if source is not None and ((num_read and missing) or (seen and "data.tag_key" in missing)):
        key = "data.tag_key" if "data.tag_key" in missing else next(iter(missing))
        name = missing[key]
        message = _missing_column(key, name, columns, source, seen)
        if num_read == 1 and all(
            isinstance(value, list) and value and isinstance(value[0], dict) for value in only
        ):
            message += "; its only row holds lists: save each list of rows as a file of its own"
        of_domain = key.replace(
            "data.", "data." if key == "data.tag_key" else f"{columns.group}.", 1
        )
        raise UserError(message.replace(key, of_domain))


def rows_of_domain(records: Iterable[Record], columns: Columns, bad: BadRows) -> Iterator[int]:
    """The positions, from 0, of the rows with tags of the source's domain; rows without a known tag
    go to `bad`."""
    for place, record in enumerate(records):
        try:
            if record.bad is not None:
                raise chat_messages.RowError(record.bad)
            tag = _tag(record.values, columns)
        except chat_messages.RowError as error:
            bad.add(record.origin, str(error))
            continue
        if columns.domain_of_tag[tag] == columns.only_domain:
            yield place


def find(values: Mapping[str, object], name: str) -> object:
    """The value of a column, or None; a name that is not a column is tried as a dotted path."""
    if name in values:
        return values[name]
    value: object = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _required(columns: Columns) -> dict[str, str]:
    required = {
        "data.prompt_key": columns.prompt,
        "data.answer_key": columns.answer if columns.answer_required else None,
        "data.response_key": columns.response,
        "data.pass_rate_key": columns.pass_rate,
        "data.domain_key": None if columns.domain == _DEFAULT_DOMAIN_KEY else columns.domain,
        "data.tag_key": columns.tag,
    }
    return {key: name for key, name in required.items() if name is not None}


def _is_conversation(values: Mapping[str, object], columns: Columns) -> bool:
    """Whether its turns are trained on: it has messages, and is not a prompt with its response."""
    if (
        columns.messages is None
        or columns.response is None
        or find(values, columns.messages) is None
    ):
        return False
    return find(values, columns.prompt) is None or find(values, columns.response) is None


def _missing_column(key: str, name: str, columns: Columns, source: str, seen: set[str]) -> str:
    if name in seen:
        return f"the column '{name}' ({key}) of {source} is empty in every row"
    if len(seen) == 1 and (found := re.search(r"[;\t|]", next(iter(seen)))):
        return (
            f"{source} has one column, {next(iter(seen))!r}: separate columns with commas, not "
            f"with {found[0]!r}"
        )
    usual = next(
        (other for other in _USUAL_NAMES.get(key, ()) if other.partition(".")[0] in seen), ""
    )
    near = nearest(name, seen)
    conversation = next((other for other in _USUAL_NAMES["data.messages_key"] if other in seen), "")
    meant = (
        f"; did you mean '{near}'? Set {key}={near}"
        if near
        else f"; set {key}={usual}"
        if usual
        else ""
    )
    if columns.messages is not None and name in (columns.prompt, columns.response):
        meant = meant or (f"; set data.messages_key={conversation}" if conversation else "")
        meant = f", nor one of conversations, '{columns.messages}' (data.messages_key){meant}"
    shown = ", ".join(sorted(seen)[:100]) or "none"
    message = f"no row of {source} has the column '{name}' ({key}){meant}; columns: {shown}"
    if seen and not meant:
        message += f"; set {key} to one of them"
    if key == "data.answer_key" and not meant:
        message += (
            "; without answers, use your own reward function: "
            "custom_reward_function.path=my_reward.py"
        )
    return message


def _tag(values: Mapping[str, object], columns: Columns) -> str:
    """The row's tag; empty if none is read. Raises RowError for one that no domain has."""
    found = None if columns.tag is None else find(values, columns.tag)
    tag = str(found) if isinstance(found, str | int) else ""
    if columns.tag is not None and not tag:
        raise chat_messages.RowError(
            f"the tag (column '{columns.tag}', data.tag_key) is "
            f"{chat_messages.kind(plain(found))}, not a text"
        )
    if columns.domain_of_tag and tag not in columns.domain_of_tag:
        known = columns.domain_of_tag
        near = f"; did you mean '{near}'?" if (near := nearest(tag, known)) else ""
        raise chat_messages.RowError(
            f"no domain has the tag '{tag}' (column '{columns.tag}'){near}: put it into "
            "data.domains.NAME.tags; "
            f"there are {', '.join(known)}"
        )
    return tag


def _raw_row(record: Record, columns: Columns, tag: str) -> RawRow:
    """The row. Raises RowError with its problem."""
    values = record.values
    is_conversation = _is_conversation(values, columns)
    prompt: JSON | chat_messages.Messages
    images: tuple[str, ...] = ()
    if is_conversation:
        assert columns.messages is not None
        if columns.images is not None and find(values, columns.images):
            raise chat_messages.RowError(
                f"a conversation cannot have images (column '{columns.images}'): give a prompt and "
                "a response"
            )
        prompt = chat_messages.read_conversation(
            plain(find(values, columns.messages)), columns.messages
        )
    else:
        prompt = plain(find(values, columns.prompt))
        if columns.images is not None and (found := find(values, columns.images)) is not None:
            images = read_images(found, columns.images, _folder_of(record.origin), columns.store)
            prompt = place_images(prompt, len(images))
        prompt = chat_messages.read_prompt(prompt, columns.prompt)
    answer = plain(find(values, columns.answer))
    if columns.answer_required and answer in (None, "", []):
        raise chat_messages.RowError(f"no answer in the column '{columns.answer}'")
    kwargs = plain(values.get(TEMPLATE_KWARGS_COLUMN))
    domain = find(values, columns.domain) if columns.domain is not None else columns.only_domain
    is_chat = columns.is_chat or not isinstance(prompt, str)
    return RawRow(
        origin=record.origin,
        prompt=prompt,
        answer=answer,
        domain=DEFAULT_DOMAIN if domain in (None, "") else str(domain),
        response=None
        if is_conversation or columns.response is None
        else _response(values, columns.response),
        extra_info=_extra_info(values, columns, is_conversation),
        tools=chat_messages.read_tools(plain(find(values, columns.tools)), columns.tools)
        if is_chat
        else [],
        template_kwargs=chat_messages.read_template_kwargs(kwargs, TEMPLATE_KWARGS_COLUMN)
        if is_chat
        else {},
        is_conversation=is_conversation,
        pass_rate=None if columns.pass_rate is None else _pass_rate(values, columns.pass_rate),
        tag=tag,
        images=images,
    )


def _folder_of(origin: str) -> Path | None:
    """The folder of the file, or of the data set, that a row is from; None if it is from
    neither."""
    path = Path(re.sub(r"(:\d+|, (row|entry) \d+)$", "", origin)).expanduser()
    return path if path.is_dir() else path.parent if path.is_file() else None


def _pass_rate(values: Mapping[str, object], name: str) -> float:
    found = plain(find(values, name))
    try:
        rate = (
            float(found)
            if isinstance(found, str | int | float) and not isinstance(found, bool)
            else math.nan
        )
    except ValueError:
        rate = math.nan
    if math.isfinite(rate):
        return rate
    raise chat_messages.RowError(
        f"the pass rate (column '{name}') is {chat_messages.kind(found)}, not a finite number"
    )


def _response(values: Mapping[str, object], name: str) -> str:
    found = find(values, name)
    if not isinstance(found, str) or not found:
        raise chat_messages.RowError(
            f"the response (column '{name}') is {chat_messages.kind(found)}, not a text"
        )
    chat_messages.check_unicode(found, f"the response (column '{name}')")
    return found


def _extra_info(
    values: Mapping[str, object], columns: Columns, is_conversation: bool
) -> dict[str, JSON]:
    """The rest of the row; a column `extra_info` that is a mapping is spread, as reward functions
    expect it."""
    used = {columns.prompt, columns.answer, columns.domain, columns.response, columns.images}
    if is_conversation:
        used.add(columns.messages)
    rest = {
        name: plain(value)
        for name, value in values.items()
        if name not in used and value is not None
    }
    spread = rest.pop("extra_info", {})
    return {**rest, **spread} if isinstance(spread, dict) else {**rest, "extra_info": spread}


def plain(value: object) -> JSON:
    """The value as JSON, for reward functions, ledgers and saved batches. Dates become ISO texts,
    sets sorted lists: their own order differs between processes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        entries = [plain(entry) for entry in value]
        return sorted(entries, key=repr) if isinstance(value, set) else entries
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return (
            int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
        )
    if callable(tolist := getattr(value, "tolist", None)):
        return plain(tolist())  # numpy scalars and arrays
    return repr(value)[:1000]
