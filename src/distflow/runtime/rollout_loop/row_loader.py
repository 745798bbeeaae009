"""Groups that are rows of the data set (fine-tuning, reward models): those that start together are
loaded as one batch, without a task for each, and those of the next step while the current one
trains."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow, PromptRows, UnusableRow
from distflow.data.sample import Sample
from distflow.graph import BoundNode
from distflow.runtime.sample_queue.protocol import LoadedGroups
from distflow.scheduling.group_states import PromptGroup

SAMPLES_OF_ROW = "samples_of_row"
"""Attribute of a node's function that only loads the samples of a row: how it does that, as
`SamplesOfRow`."""

SamplesOfRow = Callable[[PromptGroup, PromptRow, PreTrainedTokenizerBase], list[Sample]]


@dataclass(frozen=True)
class _Loaded:
    """unusable: the groups without a usable row, with the reason."""

    groups: LoadedGroups[Batch]
    unusable: Sequence[tuple[PromptGroup, UnusableRow]] = ()


@dataclass
class RowLoader:
    """Loads the groups of a pipeline whose only node of the rollout loop reads the data set."""

    rows: Sequence[PromptRow]
    samples_of_row: SamplesOfRow
    tokenizer: PreTrainedTokenizerBase
    _ahead: _Loaded | None = None

    @staticmethod
    def of(
        nodes: Sequence[BoundNode], rows: Sequence[PromptRow], tokenizer: Any
    ) -> "RowLoader | None":
        """None if the nodes of the rollout loop do more than to load rows."""
        samples_of_row = None
        if len(nodes) == 1:
            samples_of_row = getattr(nodes[0].fn, SAMPLES_OF_ROW, None)

        if samples_of_row is None:
            return None
        return RowLoader(rows, samples_of_row, tokenizer)

    def load(self, prompt_groups: Sequence[PromptGroup]) -> _Loaded:
        """The samples of these groups."""
        if found := self._found_ahead(prompt_groups):
            return found

        if isinstance(self.rows, PromptRows):
            self.rows.prepare([group.row for group in prompt_groups])

        usable = list[PromptGroup]()
        samples = list[Sample]()
        unusable = list[tuple[PromptGroup, UnusableRow]]()
        for group in prompt_groups:
            try:
                row = self.rows[group.row]
            except UnusableRow as error:
                unusable.append((group, error))
                continue

            usable.append(group)
            samples += self.samples_of_row(group, row, self.tokenizer)

        return _Loaded(LoadedGroups.of(usable, Batch.from_samples(samples)), unusable)

    def load_ahead(self, prompt_groups: Sequence[PromptGroup]) -> None:
        """Load groups that will probably start next."""
        self._ahead = None
        if prompt_groups:
            with suppress(Exception):  # it is raised again when they start
                self._ahead = self.load(prompt_groups)
                _ = self._ahead.groups.finished  # computed now, and kept

    @property
    def batch_ahead(self) -> Batch | None:
        """The samples that were loaded ahead."""
        if self._ahead is None:
            return None
        return self._ahead.groups.data

    def _found_ahead(self, prompt_groups: Sequence[PromptGroup]) -> _Loaded | None:
        """These groups as they were loaded ahead; None if one of them was not."""
        if self._ahead is None:
            return None

        loaded = self._ahead.groups
        if loaded.prompt_groups == prompt_groups:
            return self._ahead

        places = {group: place for place, group in enumerate(loaded.prompt_groups)}
        if any(group not in places for group in prompt_groups):
            return None

        size = loaded.group_size
        rows = list[int]()
        for group in prompt_groups:
            first = places[group] * size
            rows += range(first, first + size)

        return _Loaded(LoadedGroups.of(prompt_groups, loaded.data.select(rows)))
