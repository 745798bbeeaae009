"""Prompts, ready for an engine, and sets of them."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from distflow.data.dataset_columns import RawRow
from distflow.data.sample import Segment
from distflow.observe.files import JSON

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
)
"""The fields that exist before any node has run."""

Ids = NDArray[np.int32]
Turns = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready for an engine.

    index: its row in the set. prompt_text: the text that was tokenised. response_ids: the response to train on, with
    the end token (SFT), else None. turns: start and end of the assistant's turns in the response of a conversation;
    None if all of it is one turn. origin: file and line.
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

    def answer(self, version: int) -> list[Segment]:
        """The response: trained segments as those of the policy of that version, the others as the environment's."""
        ids = self.response_ids or ()
        segments, done = [], 0
        for start, end in self.turns or ((0, len(ids)),):
            if start > done:
                segments.append(Segment("environment", ids[done:start]))
            zeros = (0.0,) * (end - start)
            segments.append(Segment("policy", ids[start:end], zeros, zeros, (version,) * (end - start)))
            done = end
        return segments


@dataclass(frozen=True)
class PromptOptions:
    """The keys of `data` that turn a row into a prompt; lengths in tokens.

    prompt_format: "text", or "chat": a str prompt becomes one user message. Lists of messages are always chat.
    prompt_template: text around a str prompt, with `{prompt}` in it, plain braces doubled.
    system_prompt: chat only; a row's own takes precedence.
    template_kwargs: for the chat template; a row's own take precedence.
    keep_messages: keep a chat's messages in the row's extra info, for reward functions that read them.
    num_workers: threads that tokenise; 0 uses the calling thread. The result is the same.
    pass_rate: [low, high] of the rows to use, None for all. group: of the config keys, for messages.
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
    num_workers: int = 4
    pass_rate: tuple[float, float] | None = None
    group: str = "data"


@dataclass(frozen=True)
class PromptReport:
    """Counts of the rows. num_turns: assistant turns to train on. num_texts_more: extra texts of conversations."""

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
        """Lines on the rows that are used, and those that are left out and why."""
        counts = {
            "turns of the assistant to train on": self.num_turns,
            "more rows, of turns that the chat template writes differently once others follow": self.num_texts_more,
            "bad rows skipped": self.num_bad,
            "rows outside of data.pass_rate left out": self.num_outside,
            "over-long prompts left out": self.num_overlong_prompts,
            "over-long responses left out": self.num_overlong_responses,
            "cut to the longest length": self.num_truncated,
        }
        used = f"{self.num_rows:,} rows, longest prompt {self.longest_prompt_tokens} tokens"
        return [used, *(f"{number:,} {what}" for what, number in counts.items() if number)]

    @staticmethod
    def joined(parts: Sequence["PromptReport"]) -> "PromptReport":
        """Sum over several sets."""
        sums = {item.name: sum(getattr(part, item.name) for part in parts) for item in fields(PromptReport)}
        return PromptReport(**{**sums, "longest_prompt_tokens": max(part.longest_prompt_tokens for part in parts)})


@dataclass(frozen=True)
class Encoded:
    """An encoded row; token ids."""

    text: str
    ids: Sequence[int]
    response_ids: Sequence[int] | None = None
    turns: Turns | None = None


class PromptSet(Sequence[PromptRow]):
    """Prompts in the order of their rows, their tokens stored flat."""

    def __init__(self, rows: Sequence[RawRow], encoded: Sequence[Encoded], report: PromptReport) -> None:
        assert len(rows) == len(encoded)
        self.report = report
        self._rows = list(rows)
        self._texts = [entry.text for entry in encoded]
        self._prompts = _Flat([entry.ids for entry in encoded])
        has_responses = any(entry.response_ids is not None for entry in encoded)
        self._responses = _Flat([entry.response_ids or () for entry in encoded]) if has_responses else None
        self._turns = [entry.turns for entry in encoded]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows[index]
        return PromptRow(
            index=index % len(self),
            prompt_ids=self._prompts[index],
            prompt_text=self._texts[index],
            ground_truth=row.answer,
            domain=row.domain,
            extra_info=row.extra_info,
            response_ids=None if self._responses is None else self._responses[index],
            origin=row.origin,
            turns=self._turns[index],
        )

    @staticmethod
    def joined(sets: Sequence["PromptSet"]) -> "PromptSet":
        """Several sets, concatenated."""
        if len(sets) == 1:
            return sets[0]
        rows = [row for each in sets for row in each._rows]
        encoded = [entry for each in sets for entry in each._encoded()]
        return PromptSet(rows, encoded, PromptReport.joined([each.report for each in sets]))

    def _encoded(self) -> Iterator[Encoded]:
        for i, (text, turns) in enumerate(zip(self._texts, self._turns, strict=True)):
            response = None if self._responses is None else self._responses[i]
            yield Encoded(text, self._prompts[i], response, turns)

    @property
    def domains(self) -> list[str]:
        """Sorted, each once."""
        return sorted({row.domain for row in self._rows})

    @property
    def has_messages(self) -> bool:
        """Whether a prompt is chat messages."""
        return any(not isinstance(row.prompt, str) for row in self._rows)

    @property
    def has_responses(self) -> bool:
        return self._responses is not None

    def fingerprint(self) -> str:
        """A hash of everything in the rows that affects a run: tokens, texts, ground truths, domains, extra info."""
        digest = hashlib.sha256()
        for part in (self._prompts, self._responses):
            digest.update(part.bytes() if part is not None else b"no responses")
        for text, row in zip(self._texts, self._rows, strict=True):
            digest.update(json.dumps([text, row.answer, row.domain, row.extra_info], sort_keys=True).encode())
        if any(self._turns):
            digest.update(json.dumps(self._turns).encode())
        return digest.hexdigest()


class _Flat:
    """Lists of token ids, end to end."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        self._values: Ids = np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(self._ends[-1]))

    def __getitem__(self, index: int) -> tuple[int, ...]:
        index %= len(self._ends) - 1
        return tuple(self._values[self._ends[index] : self._ends[index + 1]].tolist())

    def bytes(self) -> bytes:
        return self._ends.tobytes() + self._values.tobytes()
