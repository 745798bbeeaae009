"""Prompts that are ready for an engine, and sets of them."""

import hashlib
import json
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import overload

from distflow.builtin_names import PROMPT_CHAT, PROMPT_MESSAGES
from distflow.data.dataset_columns import RawRow
from distflow.data.sample import Segment
from distflow.errors import UserError
from distflow.observe.crash_safe_files import JSON

PROMPT_FIELDS = (
    *(
        "uid",
        "prompts",
        "prompt_ids",
        "domain",
        "ground_truth",
        "extra_info",
        "group_index",
        "episode_index",
    ),
    *("agent", "forks", "conversation", "images"),
)
"""The fields that exist before any node has run."""

Turns = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready for an engine.

    index: its row in the set. prompt_text: the text that was tokenised. response_ids: the response
    to train on, with the end token (SFT), else None. turns: start and end of the assistant's turns
    in the response of a conversation; None if it is a single turn. origin: file and line. tag: ""
    if none is read. rejected_ids: for a preference pair the worse response (`response_ids` is the
    better one), else None. images: paths, see
    `read_images`. workflow: of its episodes, replacing the run's.
    """

    index: int
    prompt_ids: tuple[int, ...]
    prompt_text: str
    ground_truth: JSON = None
    domain: str = "default"
    extra_info: dict[str, JSON] | None = None
    response_ids: tuple[int, ...] | None = None
    origin: str = ""
    turns: Turns | None = None
    tag: str = ""
    rejected_ids: tuple[int, ...] | None = None
    images: tuple[str, ...] = ()
    workflow: object = field(default=None, compare=False)

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
    """The keys of `data` that turn a row into a prompt; lengths in tokens.

    prompt_format: "text", or "chat": a str prompt becomes one user message. Lists of messages are
    always chat. prompt_template: text around a str prompt, with `{prompt}` in it, plain braces
    doubled. system_prompt: only for chat; a row's own takes precedence. template_kwargs: for the
    chat template; a row's own take precedence. keep_messages: keep the prompt's messages in the
    row's extra info, for reward functions that read them; keep_chats: only those of chats, also for
    workflows. num_workers: threads that tokenise; 0 uses the calling thread. The result is the
    same. pass_rate: [low, high] of the rows to use, None for all. group: of the config keys, for
    messages. pair: the columns of the chosen and the rejected response, of preference pairs.
    """

    max_prompt_length: int
    max_response_length: int
    prompt_format: str = "text"
    prompt_template: str | None = None
    system_prompt: str | None = None
    enable_thinking: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    filter_overlong: bool = True
    truncation: str = "error"
    keep_messages: bool = False
    keep_chats: bool = False
    has_own_replies: bool = False
    """The assistant's messages in the prompts are the model's own, and may have words of the
    template."""
    num_workers: int = 4
    pass_rate: tuple[float, float] | None = None
    group: str = "data"
    pair: tuple[str, str] | None = None


@dataclass(frozen=True)
class PromptReport:
    """Counts of rows. num_turns: assistant turns to train on. num_texts_more: extra texts of
    conversations."""

    num_rows: int
    num_bad: int
    num_overlong_prompts: int
    num_overlong_responses: int
    num_truncated: int
    longest_prompt_tokens: int
    num_turns: int = 0
    num_texts_more: int = 0
    num_outside: int = 0

    def lines(self) -> list[str]:
        """Lines on the rows that are used, and on those left out, with the reasons."""
        counts = {
            "assistant turns to train on": self.num_turns,
            (
                "more rows, of turns that the chat template renders differently if others follow"
            ): self.num_texts_more,
            "bad rows skipped": self.num_bad,
            "rows outside data.pass_rate left out": self.num_outside,
            "overlong prompts left out": self.num_overlong_prompts,
            "overlong responses left out": self.num_overlong_responses,
            "truncated to the maximum length": self.num_truncated,
        }
        used = f"{self.num_rows:,} rows, longest prompt {self.longest_prompt_tokens} tokens"
        return [used, *(f"{number:,} {what}" for what, number in counts.items() if number)]

    @property
    def num_left_out(self) -> int:
        num_overlong = self.num_overlong_prompts + self.num_overlong_responses
        return self.num_bad + self.num_outside + num_overlong - self.num_texts_more

    @staticmethod
    def joined(parts: Sequence["PromptReport"]) -> "PromptReport":
        """The sum over several sets."""
        sums = {
            item.name: sum(getattr(part, item.name) for part in parts)
            for item in fields(PromptReport)
        }
        return PromptReport(
            **{**sums, "longest_prompt_tokens": max(part.longest_prompt_tokens for part in parts)}
        )


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded row; token ids."""

    text: str
    ids: Sequence[int]
    response_ids: Sequence[int] | None = None
    turns: Turns | None = None
    rejected_ids: Sequence[int] | None = None

    @property
    def longest_response(self) -> Sequence[int]:
        return max(self.response_ids or (), self.rejected_ids or (), key=len)

    def packed(self) -> "Encoded":
        """The entry with four bytes per id."""
        both = [
            None if ids is None else array("i", ids)
            for ids in (self.response_ids, self.rejected_ids)
        ]
        return Encoded(self.text, array("i", self.ids), both[0], self.turns, both[1])


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
        return self._row(chosen) if isinstance(chosen, int) else list(self.some(chosen))

    def some(self, indices: Sequence[int]) -> Iterator[PromptRow]:
        """The usable ones among these rows."""
        self.prepare(indices)
        for index in indices:
            with suppress(UnusableRow):
                yield self._row(index)

    def prepare(self, indices: Sequence[int]) -> None:
        """Called with the rows to be read next, if preparing them together is cheaper."""


class PromptSet(PromptRows):
    """Prompts in row order. has_responses: whether there are responses to train on."""

    def __init__(
        self, rows: Sequence[RawRow], encoded: Sequence[Encoded], report: PromptReport
    ) -> None:
        assert len(rows) == len(encoded)
        self.report = report
        self._rows = list(rows)
        self._encoded = [entry.packed() for entry in encoded]
        self.has_responses = any(entry.response_ids is not None for entry in encoded)

    def __len__(self) -> int:
        return len(self._rows)

    def _row(self, index: int) -> PromptRow:
        row = self._rows[index]
        entry = self._encoded[index]
        return PromptRow(
            index=index,
            prompt_ids=tuple(entry.ids),
            prompt_text=entry.text,
            ground_truth=row.answer,
            domain=row.domain,
            extra_info=row.extra_info,
            response_ids=tuple(entry.response_ids or ()) if self.has_responses else None,
            origin=row.origin,
            turns=entry.turns,
            tag=row.tag,
            rejected_ids=None if entry.rejected_ids is None else tuple(entry.rejected_ids),
            images=row.images,
        )

    @staticmethod
    def joined(sets: Sequence["PromptSet"]) -> "PromptSet":
        """Several sets, concatenated."""
        if len(sets) == 1:
            return sets[0]
        rows = [row for each in sets for row in each._rows]
        encoded = [entry for each in sets for entry in each._encoded]
        return PromptSet(rows, encoded, PromptReport.joined([each.report for each in sets]))

    @property
    def domains(self) -> list[str]:
        """The domains, sorted, each once."""
        return sorted({row.domain for row in self._rows})

    @property
    def has_messages(self) -> bool:
        """Whether a prompt is chat messages."""
        return any(not isinstance(row.prompt, str) for row in self._rows)

    @property
    def has_images(self) -> bool:
        """Whether a prompt has images."""
        return any(row.images for row in self._rows)

    def fingerprint(self) -> str:
        """A hash of what affects a run in the rows: tokens, texts, ground truths, domains, extra
        info (without the messages, which are added for some reward functions), tags."""
        digest = hashlib.sha256()
        digest.update(_flat([entry.ids for entry in self._encoded]))
        responses = [entry.response_ids or () for entry in self._encoded]
        digest.update(_flat(responses) if self.has_responses else b"no responses")
        for entry, row in zip(self._encoded, self._rows, strict=True):
            extra = {
                name: value
                for name, value in row.extra_info.items()
                if name not in (PROMPT_CHAT, PROMPT_MESSAGES)
            }
            digest.update(
                json.dumps([entry.text, row.answer, row.domain, extra], sort_keys=True).encode()
            )
        if any(entry.turns for entry in self._encoded):
            digest.update(json.dumps([entry.turns for entry in self._encoded]).encode())
        if any(row.tag for row in self._rows):
            digest.update(json.dumps([row.tag for row in self._rows]).encode())
        if any(row.images for row in self._rows):
            digest.update(
                json.dumps(
                    [[Path(path).stem for path in row.images] for row in self._rows]
                ).encode()
            )
        return digest.hexdigest()


def _flat(lists: Sequence[Sequence[int]]) -> bytes:
    """The ends of the lists in one flat list (int64), then their ids (int32)."""
    ends = array("q", accumulate(map(len, lists), initial=0))
    return ends.tobytes() + b"".join(array("i", ids).tobytes() for ids in lists)
