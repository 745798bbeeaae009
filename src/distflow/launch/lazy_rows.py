"""Training rows that are read from the user's files when their groups start (`data.lazy`)."""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from distflow.config import Config
from distflow.data.encoded_prompts import PromptRow, PromptRows, PromptSet
from distflow.data.rows_on_demand import IndexedFile, index_file
from distflow.errors import UserError
from distflow.launch.data_sources import DataSource
from distflow.untrusted_files import matching_files

NUM_HELD = 4096
LoadTokenizer = Callable[[], PreTrainedTokenizerBase]


class LazyRows(PromptRows):
    """The rows of some sources, each read and encoded on demand. first: the first rows of each
    source, read before the run. load_tokenizer: called by each process that reads rows."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        first: PromptSet,
        folder: Path,
        load_tokenizer: LoadTokenizer,
    ) -> None:
        """folder: for the index of the files. Raises UserError for files that cannot be read row by
        row."""
        self.first = first
        self._load_tokenizer = load_tokenizer
        self._files = list[tuple[DataSource, IndexedFile, int]]()
        self.num_by_domain = dict[str, int]()
        self._held = dict[int, PromptRow]()

        for source in sources:
            num_rows = 0
            for path in _files_of(source.files):
                found = index_file(path, folder, source.key)
                if source.max_samples >= 0:
                    left = source.max_samples - num_rows
                    found = replace(found, num_rows=min(found.num_rows, left))
                self._files.append((source, found, found.num_rows))
                num_rows += found.num_rows

            self.num_by_domain[source.domain] = num_rows

        self._ends = list(accumulate(num_rows for *_, num_rows in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load_tokenizer()

    def fingerprint(self) -> str:
        """A hash of the files' content."""
        files = [(found.fingerprint, num_rows) for _, found, num_rows in self._files]
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def prepare(self, indices: Sequence[int]) -> None:
        """Render chat templates for all of them at once. An error is raised when its row is
        read."""
        wanted = sorted(set(indices) - self._held.keys())
        for number, own in groupby(wanted, lambda index: bisect_right(self._ends, index)):
            with suppress(UserError):
                self._held |= self._read(number, list(own))
        for index in list(self._held)[:-NUM_HELD]:
            self._held.pop(index, None)

    def _row(self, index: int) -> PromptRow:
        return self._held.get(index) or self._read(bisect_right(self._ends, index), [index])[index]

    def _read(self, number: int, indices: Sequence[int]) -> dict[int, PromptRow]:
        """The usable ones among these rows of a file."""
        source, file, _ = self._files[number]
        first = self._ends[number - 1] if number else 0
        file_rows = [file.row(index - first) for index in indices]
        index_of = {origin: index for (origin, _), index in zip(file_rows, indices, strict=True)}

        found = dict[int, PromptRow]()
        for row in source.prompts(file_rows, self._tokenizer):
            index = index_of[row.origin]
            if index in found:
                raise UserError(f"{row.origin} becomes several rows: set data.lazy=false")

            found[index] = replace(row, index=index)

        return found


def _files_of(sources: Sequence[str]) -> Iterator[Path]:
    """The files that are meant, of which some are named by patterns."""
    for source in sources:
        for path in matching_files(source) or [Path(source)]:
            yield path.expanduser().absolute()


def num_rows_of(config: Config, prompts: PromptSet | LazyRows) -> dict[str, int]:
    """The number of rows by domain, in row order; "" for one source."""
    if not config.data.domains:
        return {"": len(prompts)}
    if isinstance(prompts, LazyRows):
        return prompts.num_by_domain
    return dict(Counter(row.domain for row in prompts))
