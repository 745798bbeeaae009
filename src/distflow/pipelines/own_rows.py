"""Prompts of the user's own, beside those of the data set: read and encoded as these are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import overload

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.config.by_domain import reward_functions
from distflow.config.errors import UserError
from distflow.data.prompts import PromptRow
from distflow.data.rows import BadRows, Record, plain, read_rows
from distflow.data.tokenising import encode_rows
from distflow.graph import Program
from distflow.models.tokenizer import end_token_ids
from distflow.pipelines.data_sets import train_sources
from distflow.rewards.router import check_domains


class OwnRows(Sequence[PromptRow]):
    """The rows of a data set, and behind them those that were added. Its length is that of the data set; what is added
    on one thread may be read on another."""

    def __init__(self, rows: Sequence[PromptRow]) -> None:
        self._rows = rows
        self._own: dict[int, PromptRow] = {}

    def add(self, number: int, row: PromptRow) -> None:
        """number: from the length on."""
        self._own[number] = replace(row, index=number)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | Sequence[PromptRow]:
        if isinstance(index, int) and index >= len(self._rows):
            return self._own[index]
        return self._rows[index]


def encode_row(
    values: object, number: int, config: Config, program: Program, tokenizer: PreTrainedTokenizerBase
) -> PromptRow:
    """A row of Python as a prompt; its columns are those of the data set. number: for messages, from 1.

    Raises UserError for one that cannot be used, or whose domain nothing judges.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"submit takes a dict such as {{'prompt': ..., 'answer': ...}}, not a {type(values).__name__}")
    judged = "judge" in program.services
    (source,) = train_sources(config, judged)
    record = Record(f"submitted prompt {number}", {str(key): plain(value) for key, value in values.items()})
    bad = BadRows("error")
    rows = list(read_rows(iter([record]), source.columns, bad, "what was submitted"))
    bad.check()
    options = replace(source.options, num_workers=0, filter_overlong=False)
    (row,) = encode_rows(rows, tokenizer, options, bad, end_token_ids(tokenizer))
    if judged:
        check_domains(reward_functions(config), [row.domain])
    return row
