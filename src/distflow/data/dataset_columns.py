"""Rows of a data set before tokenisation: the meaning of columns, and bad rows."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from pathlib import Path

from distflow.data import messages as chat_messages
from distflow.data.images import place_images, read_images
from distflow.data.messages import RowError, kind
from distflow.data.pair_columns import Names, with_prompt
from distflow.errors import UserError, hint, nearest
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
    "data.completion_key": ("response", "output", "answer"),
    "data.label_key": ("labels", "desirable", "preferred", "feedback"),
    "data.response_key": ("completion", "output", "answer", "target", "chosen"),
    "data.tag_key": ("tag", "tags", "data_source", "source", "subset", "category"),
}
"""Usual names of these columns in data sets."""

TEMPLATE_KWARGS_COLUMN = "chat_template_kwargs"


@dataclass(frozen=True)
class Columns:
    """Names of the columns; None for those that are not read. A dotted name reaches into nested
    values: `reward_model.ground_truth`."""

    prompt: str = "prompt"
    answer: str = "answer"
    domain: str | None = _DEFAULT_DOMAIN_KEY
    """May be missing if it has its default name; None if all rows are of `only_domain`."""
    response: str | None = None
    """To learn from (SFT)."""
    answer_required: bool = True
    """Rows without an answer are bad."""
    messages: str | None = None
    """Conversations to learn from, if a row has no prompt and response."""
    tools: str = "tools"
    """Functions for the chat template."""
    is_chat: bool = False
    """Texts go through the chat template too."""
    only_domain: str = DEFAULT_DOMAIN
    group: str = "data"
    """Of the config keys that name the columns, for messages."""
    pair: Names | None = None
    """To learn from (preference pairs), see `with_prompt`."""
    labelled: tuple[str, str] | None = None
    """Of a response and its label, to learn from unless a row is a pair (KTO)."""
    tag: str | None = None
    """Every row must have it."""
    domain_of_tag: Mapping[str, str] = field(default_factory=dict)
    """Unless empty, rows of domains other than `only_domain` are skipped."""
    images: str | None = None
    store: Path = Path()
    """The folder in which images are kept."""


Values = Mapping[str, object]
"""A row's values by column."""
FileRow = tuple[str, Values | str]
"""Where a row is from (file and line), and its values, or why it cannot be read."""


@dataclass(frozen=True)
class RawRow:
    """A good row as the user's file has it, by the meaning of its columns."""

    origin: str
    """File and line."""
    prompt: str | chat_messages.Messages
    answer: JSON
    domain: str
    response: str | None
    extra_info: dict[str, JSON]
    """The other columns."""
    tools: list[JSON] = field(default_factory=list)
    """For the chat template, as `template_kwargs`."""
    template_kwargs: dict[str, JSON] = field(default_factory=dict)
    is_conversation: bool = False
    """Whether to train on the assistant's turns in `prompt`."""
    tag: str = ""
    images: tuple[str, ...] = ()
    """Paths, see `read_images`."""


@dataclass
class BadRows:
    """Bad rows: collects them to report all together, or counts and skips them."""

    policy: str = "error"
    """ "error" or "skip" (data.bad_rows)."""
    reasons: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Readable rows that are omitted because no response to them could be scored."""

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
    plural = "s" if len(reasons) > 1 else ""
    lines = [f"{len(reasons)} {what}{plural} {which}".rstrip() + ":"]
    lines += [f"  {reason}" for reason in reasons[:_MAX_SHOWN]]
    if len(reasons) > _MAX_SHOWN:
        lines.append(f"  and {len(reasons) - _MAX_SHOWN} more")
    return "\n".join(lines)


def read_rows(
    rows: Iterable[FileRow], columns: Columns, bad: BadRows, source: str | None
) -> Iterator[RawRow]:
    """The good rows of one source, None for some rows of one; the bad ones go to `bad`.

    Raises UserError if no row of a source has a required column: the prompt's, and others by
    `columns`.
    """
    seen: set[str] = set()
    missing = _required(columns)
    num_read = 0
    for origin, found in rows:
        try:
            values = _readable(found)
            seen.update(values)
            if columns.tag is not None and find(values, columns.tag) is not None:
                missing.pop("data.tag_key", None)
            tag = _tag(values, columns)
            if columns.domain_of_tag.get(tag, columns.only_domain) != columns.only_domain:
                continue

            num_read += 1
            _strike_found(missing, values, columns)
            if columns.labelled is not None and not _is_pair(values, columns):
                values = _with_label(values, columns.labelled)
            elif columns.pair is not None:
                values = _with_prompt(values, columns, columns.pair)
            row = _raw_row(origin, values, columns, tag)
        except RowError as error:
            bad.add(origin, str(error))
            continue

        yield row

    if source is None:
        return

    if "data.tag_key" in missing and seen:
        key = "data.tag_key"
    elif missing and num_read:
        key = next(iter(missing))
    else:
        return

    message = _missing_column(key, missing[key], columns, source, seen)
    group = "data" if key == "data.tag_key" else columns.group
    raise UserError(message.replace(key, key.replace("data.", f"{group}.", 1)))


def _with_prompt(values: Values, columns: Columns, names: Names) -> Values:
    """The row of a pair with its prompt apart."""
    read = {str(name): plain(value) for name, value in values.items()}
    for name in (columns.prompt, *names):
        read[name] = plain(find(values, name))
    return with_prompt(read, columns.prompt, names)


def _is_pair(values: Values, columns: Columns) -> bool:
    return columns.pair is not None and find(values, columns.pair[0]) is not None


def _with_label(values: Values, names: tuple[str, str]) -> Values:
    """The row with its response, and with its label as a bool. Raises RowError for another label.

    names: of the columns of the response and the label."""
    response, label = (plain(find(values, name)) for name in names)
    if label not in (True, False):
        raise RowError(f"the label (column '{names[1]}') is {kind(label)}, neither true nor false")
    return {**values, names[0]: response, names[1]: bool(label)}


def _readable(found: Values | str) -> Values:
    """Raises RowError for a row that cannot be read."""
    if isinstance(found, str):
        raise RowError(found)
    if is_deep(dict(found)):
        raise RowError("nested too deeply")
    return found


def _strike_found(missing: dict[str, str], values: Values, columns: Columns) -> None:
    """Remove the columns that the row has from the missing ones."""
    is_conversation = _is_conversation(values, columns)
    for key, name in list(missing.items()):
        stands_for = is_conversation and name in (columns.prompt, columns.response)
        stands_for |= name in (columns.labelled or ()) and _is_pair(values, columns)
        if stands_for or find(values, name) is not None:
            del missing[key]


def read_line(line: bytes) -> Values | str:
    """The values of a JSON object, or why there are none."""
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    except ValueError as error:
        return f"not JSON, one object on each line ({error})"
    except RecursionError:
        return "nested too deeply"

    if not isinstance(values, dict):
        return f"a JSON {type(values).__name__}, not an object"
    return values


def find(values: Values, name: str) -> object:
    """The value of a column, or None; a name that is not a column is tried as a dotted path."""
    if name in values:
        return values[name]
    value: object = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _required(columns: Columns) -> dict[str, str]:
    """The names of the columns that a source must have, by config key."""
    chosen, rejected = columns.pair or (None, None)
    completion, label = columns.labelled or (None, None)
    if columns.labelled:  # a pair has no label
        chosen = rejected = None
    required = {
        "data.prompt_key": None if columns.pair else columns.prompt,
        "data.chosen_key": chosen,
        "data.rejected_key": rejected,
        "data.completion_key": completion,
        "data.label_key": label,
        "data.answer_key": columns.answer if columns.answer_required else None,
        "data.response_key": columns.response,
        "data.domain_key": None if columns.domain == _DEFAULT_DOMAIN_KEY else columns.domain,
        "data.tag_key": columns.tag,
    }
    return {key: name for key, name in required.items() if name is not None}


def _is_conversation(values: Values, columns: Columns) -> bool:
    """Whether its turns are trained on: it has messages, and is not a prompt with its response."""
    if columns.messages is None or columns.response is None:
        return False
    if find(values, columns.messages) is None:
        return False
    return find(values, columns.prompt) is None or find(values, columns.response) is None


def likely_column(key: str, name: str, seen: Collection[str]) -> str:
    """Which of the columns of a source the key probably means by the name; empty if none."""
    usual = (each for each in _USUAL_NAMES.get(key, ()) if each.partition(".")[0] in seen)
    return nearest(name, seen) or next(usual, "")


def _missing_column(key: str, name: str, columns: Columns, source: str, seen: set[str]) -> str:
    """The message: what the source has instead, and what to set."""
    if name in seen:
        return f"the column '{name}' ({key}) of {source} is empty in every row"

    also = ""
    if columns.messages is not None and name in (columns.prompt, columns.response):
        also = f", nor one of conversations, '{columns.messages}' (data.messages_key)"
    shown = ", ".join(sorted(seen)[:100]) or "none"

    near = likely_column(key, name, seen)
    advice = f"did you mean {key}={near}?" if near else f"set {key} to one of them"

    if key == "data.answer_key" and not near:
        advice += ", or custom_reward_function.path to a reward of your own"
    return f"no row of {source} has the column '{name}' ({key}){also}; columns: {shown}; {advice}"


def _tag(values: Values, columns: Columns) -> str:
    """The row's tag; empty if none is read. Raises RowError for one that no domain has."""
    if columns.tag is None:
        return ""

    found = find(values, columns.tag)
    tag = str(found) if isinstance(found, str | int) else ""
    if not tag:
        raise RowError(
            f"the tag (column '{columns.tag}', data.tag_key) is {kind(plain(found))}, not a text"
        )

    known = columns.domain_of_tag
    if known and tag not in known:
        raise RowError(
            f"no domain has the tag '{tag}' (column '{columns.tag}'){hint(tag, known)}: put it "
            "into data.domains.NAME.tags"
        )

    return tag


def _raw_row(origin: str, values: Values, columns: Columns, tag: str) -> RawRow:
    """The row. Raises RowError with its problem."""
    is_conversation = _is_conversation(values, columns)
    prompt: str | chat_messages.Messages
    images: tuple[str, ...] = ()
    response = None
    if is_conversation:
        prompt = _conversation(values, columns)
    else:
        prompt, images = _prompt(origin, values, columns)
        if columns.response is not None:
            response = _response(values, columns.response)

    answer = plain(find(values, columns.answer))
    if columns.answer_required and answer in (None, "", []):
        raise RowError(f"no answer in the column '{columns.answer}'")

    domain: object = columns.only_domain
    if columns.domain is not None:
        domain = find(values, columns.domain)

    tools: list[JSON] = []
    template_kwargs: dict[str, JSON] = {}
    if columns.is_chat or not isinstance(prompt, str):
        tools = chat_messages.read_tools(plain(find(values, columns.tools)), columns.tools)
        template_kwargs = chat_messages.read_template_kwargs(
            plain(values.get(TEMPLATE_KWARGS_COLUMN)), TEMPLATE_KWARGS_COLUMN
        )

    return RawRow(
        origin=origin,
        prompt=prompt,
        answer=answer,
        domain=DEFAULT_DOMAIN if domain in (None, "") else str(domain),
        response=response,
        extra_info=_extra_info(values, columns, is_conversation),
        tools=tools,
        template_kwargs=template_kwargs,
        is_conversation=is_conversation,
        tag=tag,
        images=images,
    )


def _conversation(values: Values, columns: Columns) -> chat_messages.Messages:
    assert columns.messages is not None, "`_is_conversation`"
    if columns.images is not None and find(values, columns.images):
        raise RowError(
            f"a conversation cannot have images (column '{columns.images}'): give a prompt and a "
            "response"
        )

    return chat_messages.read_conversation(plain(find(values, columns.messages)), columns.messages)


def _prompt(
    origin: str, values: Values, columns: Columns
) -> tuple[str | chat_messages.Messages, tuple[str, ...]]:
    """The prompt, and the paths of its images."""
    prompt = plain(find(values, columns.prompt))
    images: tuple[str, ...] = ()
    if columns.images is not None and (found := find(values, columns.images)) is not None:
        images = read_images(found, columns.images, _folder_of(origin), columns.store)
        prompt = place_images(prompt, len(images))
    return chat_messages.read_prompt(prompt, columns.prompt), images


def _folder_of(origin: str) -> Path | None:
    """The folder of the file, or of the data set, that a row is from; None if it is from
    neither."""
    path = Path(re.sub(r"(:\d+|, (row|entry) \d+)$", "", origin)).expanduser()
    if path.is_dir():
        return path
    return path.parent if path.is_file() else None


def _response(values: Values, name: str) -> str:
    found = find(values, name)
    if not isinstance(found, str) or not found:
        raise RowError(f"the response (column '{name}') is {kind(found)}, not a text")
    chat_messages.check_unicode(found, f"the response (column '{name}')")
    return found


def _extra_info(values: Values, columns: Columns, is_conversation: bool) -> dict[str, JSON]:
    """The rest of the row; a column `extra_info` that is a mapping is spread, as reward functions
    expect it."""
    used = {columns.prompt, columns.answer, columns.domain, columns.response, columns.images}
    if is_conversation:
        used.add(columns.messages)
    # responses to learn from stay, also where one is the answer of a reward too
    used -= {*(columns.pair or ()), *(columns.labelled or ())}

    rest: dict[str, JSON] = {}
    for name, value in values.items():
        if name not in used and value is not None:
            rest[name] = plain(value)

    spread = rest.pop("extra_info", {})
    if isinstance(spread, dict):
        return {**rest, **spread}
    return {**rest, "extra_info": spread}


def plain(value: object) -> JSON:
    """The value as JSON, for reward functions, ledgers and saved batches. Dates become ISO texts,
    sets sorted lists: their own order differs between processes."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}

    if isinstance(value, list | tuple | set):
        entries = [plain(entry) for entry in value]
        if isinstance(value, set):
            return sorted(entries, key=repr)
        return entries

    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if callable(tolist := getattr(value, "tolist", None)):
        return plain(tolist())  # numpy scalars and arrays

    return repr(value)[:1000]
