"""Prompts that are ready for an engine, and sets of them."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import overload

from distflow.builtin_names import PROMPT_CHAT, PROMPT_MESSAGES
from distflow.data.dataset_columns import RawRow
from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON

PROMPT_FIELDS = (
    "uid",
    "prompts",
    "prompt_ids",
    "domain",
    "ground_truth",
    "extra_info",
    "group_index",
    "episode_index",
    "agent",
    "forks",
    "conversation",
    "images",
)
"""The fields that exist before any node has run."""

Turns = tuple[tuple[int, int], ...]
"""Start and end of each turn in a response."""


@dataclass(frozen=True)
class PromptRow:
    """An encoded row: one prompt, ready for an engine."""

    index: int
    """Its row in the set."""
    prompt_ids: tuple[int, ...]
    prompt_text: str
    """The text that was tokenised."""
    ground_truth: JSON = None
    domain: str = "default"
    extra_info: dict[str, JSON] | None = None
    response_ids: tuple[int, ...] | None = None
    """The response to train on, with the end token (SFT); of a preference pair the better one."""
    origin: str = ""
    """File and line."""
    turns: Turns | None = None
    """The assistant's turns in the response of a conversation; None if it is a single turn."""
    tag: str = ""
    """Empty if none is read."""
    rejected_ids: tuple[int, ...] | None = None
    """Of a preference pair, the worse response."""
    rejected_turns: Turns | None = None
    """Of the worse response, as `turns`."""
    images: tuple[str, ...] = ()
    """Paths, see `read_images`."""
    is_chat: bool = field(default=False, compare=False)
    """Whether the user's file has messages as its prompt."""
    workflow: object = field(default=None, compare=False)
    """Of its episodes, replacing the run's; not kept in sets."""

    @staticmethod
    def of(
        row: RawRow,
        text: str,
        prompt_ids: Iterable[int],
        response_ids: Iterable[int] | None = None,
        *,
        turns: Turns | None = None,
        rejected_ids: Iterable[int] | None = None,
    ) -> "PromptRow":
        """The row, encoded. Its index is set by its set."""
        return PromptRow(
            index=0,
            prompt_ids=tuple(prompt_ids),
            prompt_text=text,
            ground_truth=row.answer,
            domain=row.domain,
            extra_info=row.extra_info,
            response_ids=None if response_ids is None else tuple(response_ids),
            origin=row.origin,
            turns=turns,
            tag=row.tag,
            rejected_ids=None if rejected_ids is None else tuple(rejected_ids),
            images=row.images,
            is_chat=not isinstance(row.prompt, str),
        )

    @property
    def rejected(self) -> "PromptRow":
        """Of a pair, the row with the worse response as its response."""
        return replace(self, response_ids=self.rejected_ids, turns=self.rejected_turns)

    @property
    def longest_response(self) -> tuple[int, ...]:
        """The longer one of a pair."""
        return max(self.response_ids or (), self.rejected_ids or (), key=len)

    @property
    def content(self) -> tuple[object, ...]:
        """What two rows have in common if they are the same task."""
        return self.prompt_text, self.response_ids, self.images

    def answer(self, version: int) -> list[Segment]:
        """The response: trained segments as the policy's of that version, others as the
        environment's."""
        ids = self.response_ids or ()
        segments = []
        done = 0
        for start, end in self.turns or ((0, len(ids)),):
            if start > done:
                segments.append(Segment("environment", ids[done:start]))
            zeros = (0.0,) * (end - start)
            segments.append(
                Segment("policy", ids[start:end], zeros, zeros, (version,) * (end - start))
            )
            done = end

        return segments


@dataclass(frozen=True)
class PromptOptions:
    """The keys of `data` that turn a row into a prompt; lengths in tokens."""

    max_prompt_length: int
    max_response_length: int
    prompt_format: str = "text"
    """ "text", or "chat": a str prompt becomes one user message. Lists of messages are always
    chat."""
    prompt_template: str | None = None
    """Text around a str prompt, with `{prompt}` in it, plain braces doubled."""
    system_prompt: str | None = None
    """Only for chat; a row's own takes precedence."""
    enable_thinking: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """For the chat template; a row's own take precedence."""
    filter_overlong: bool = True
    truncation: str = "error"
    keep_messages: bool = False
    """Keep the prompt's messages in the row's extra info, for reward functions that read them."""
    keep_chats: bool = False
    """Keep those of chats alone, also for workflows."""
    has_own_replies: bool = False
    """The assistant's messages in the prompts are the model's own, and may have words of the
    template."""
    num_workers: int = 4
    """Threads that tokenise; 0 uses the calling thread. The result is the same."""
    pair: tuple[str, str] | None = None
    """The columns of the chosen and the rejected response, of preference pairs."""
    labelled: tuple[str, str] | None = None
    """The columns of a response and its label, of rows that are not pairs."""
    scores_pairs: bool = False
    """A pair is two texts for a reward model."""


@dataclass(frozen=True)
class PromptReport:
    """Counts of rows, read for a set of prompts."""

    num_rows: int = 0
    """Those in the set."""
    num_bad: int = 0
    num_overlong_prompts: int = 0
    num_overlong_responses: int = 0
    num_truncated: int = 0
    longest_prompt_tokens: int = 0
    num_turns: int = 0
    """Turns of the assistant to train on."""
    num_texts_more: int = 0
    """Texts of conversations beyond the first of each."""

    def lines(self) -> list[str]:
        """Lines on the rows that are used, and on those left out, with the reasons."""
        counts = {
            "assistant turns to train on": self.num_turns,
            (
                "more rows, of turns that the chat template renders differently if others follow"
            ): self.num_texts_more,
            "bad rows skipped": self.num_bad,
            "overlong prompts left out": self.num_overlong_prompts,
            "overlong responses left out": self.num_overlong_responses,
            "truncated to the maximum length": self.num_truncated,
        }
        used = f"{self.num_rows:,} rows, longest prompt {self.longest_prompt_tokens} tokens"

        return [used, *(f"{number:,} {what}" for what, number in counts.items() if number)]

    @staticmethod
    def joined(parts: Sequence["PromptReport"]) -> "PromptReport":
        """The sum over several sets."""
        sums: dict[str, int] = {}
        for count in fields(PromptReport):
            sums[count.name] = sum(getattr(part, count.name) for part in parts)
        longest = max(part.longest_prompt_tokens for part in parts)
        return replace(PromptReport(**sums), longest_prompt_tokens=longest)


class UnusableRow(UserError):
    """No usable row: among all that are read, or the current one. reason: a short name for the
    counts."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PromptRows(Sequence[PromptRow]):
    """Prompts that are created when read; subclasses have `__len__` and `_row`. A slice has only
    usable ones."""

    @abstractmethod
    def _row(self, index: int) -> PromptRow:
        """index: from 0, below the length. Raises UnusableRow if rows are read one at a time."""

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        chosen = range(len(self))[index]
        if isinstance(chosen, int):
            return self._row(chosen)
        return list(self.some(chosen))

    def some(self, indices: Sequence[int]) -> Iterator[PromptRow]:
        """The usable ones among these rows."""
        self.prepare(indices)
        for index in indices:
            with suppress(UnusableRow):
                yield self._row(index)

    def prepare(self, indices: Sequence[int]) -> None:
        """Called with the rows to be read next, if preparing them together is cheaper."""


class PromptSet(PromptRows):
    """Prompts in row order, each kept as a line of JSON, which takes less memory."""

    def __init__(self, rows: Iterable[PromptRow], report: PromptReport) -> None:
        self.report = report
        self.lines: list[bytes] = []
        self.has_messages = False
        """Whether a prompt is chat messages."""
        self.has_images = False

        domains = set[str]()
        for row in rows:
            self.lines.append(write_line(row))
            self.has_messages |= row.is_chat
            self.has_images |= bool(row.images)
            domains.add(row.domain)

        self.domains = sorted(domains)
        """Each once."""

    def __len__(self) -> int:
        return len(self.lines)

    def _row(self, index: int) -> PromptRow:
        return read_line(self.lines[index], index)

    @staticmethod
    def joined(sets: Sequence["PromptSet"]) -> "PromptSet":
        """Several sets, concatenated."""
        if len(sets) == 1:
            return sets[0]
        rows = chain.from_iterable(sets)
        return PromptSet(rows, PromptReport.joined([each.report for each in sets]))

    def fingerprint(self) -> str:
        """A hash of what affects a run in the rows: tokens, texts, ground truths, domains, extra
        info (without the messages, which are added for some reward functions), tags."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for row in self:
            extra = dict(row.extra_info or {})
            extra.pop(PROMPT_CHAT, None)
            extra.pop(PROMPT_MESSAGES, None)
            names = tuple(Path(path).stem for path in row.images)
            read = replace(row, extra_info=extra, images=names, origin="", is_chat=False)
            digest.update(write_line(read) + b"\n")

        return digest.hexdigest()


_STORED = tuple(item.name for item in fields(PromptRow) if item.name not in ("index", "workflow"))
_TUPLES = ("prompt_ids", "response_ids", "rejected_ids", "images")


def write_line(row: PromptRow) -> bytes:
    """The row as JSON in one line, without its index."""
    return json.dumps([getattr(row, name) for name in _STORED]).encode()


def read_line(line: bytes, index: int) -> PromptRow:
    """The row from the result of `write_line`."""
    values = dict(zip(_STORED, json.loads(line), strict=True))
    for name in _TUPLES:
        if values[name] is not None:
            values[name] = tuple(values[name])

    for name in ("turns", "rejected_turns"):
        if values[name] is not None:
            values[name] = tuple(map(tuple, values[name]))
    return PromptRow(index=index, **values)
