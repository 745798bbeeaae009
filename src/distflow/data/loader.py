"""Rows by ticket: which row a ticket's number names, and whether a resumed run sees the same data."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from distflow.config.errors import UserError
from distflow.data.prompts import PromptRow, PromptSet
from distflow.flow.order import place

PROMPT_FIELDS = ("uid", "prompts", "prompt_ids", "domain", "ground_truth", "extra_info", "group_index")
RESPONSE_FIELDS = ("responses", "response_ids", "response_mask")

_WHAT_TO_DO = {
    "fingerprint": "the data or the tokenizer changed: give back the old ones (data.train_files, tokenizer_path)",
    "num_rows": "the data set has other rows: give back the old ones (data.train_files, data.max_prompt_length)",
    "seed": "give back the old data.seed",
    "shuffle": "give back the old data.shuffle",
}


class Loader:
    """A data set in the order of tickets. It has no state: ticket `number` names the same row whenever it is asked."""

    def __init__(self, rows: PromptSet, *, seed: int, shuffle: bool) -> None:
        assert len(rows) > 0
        self.rows = rows
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self.rows)

    def place(self, number: int) -> tuple[int, int]:
        """Epoch and row of ticket `number`."""
        return place(number, len(self.rows), self._seed, self._shuffle)

    def row_of(self, number: int) -> PromptRow:
        """The prompt of ticket `number`."""
        return self.rows[self.place(number)[1]]

    def data_fields(self) -> tuple[str, ...]:
        """The fields that exist before any node ran; those of the responses where the data set has them (SFT)."""
        return PROMPT_FIELDS + RESPONSE_FIELDS if self.rows.has_responses else PROMPT_FIELDS

    @cached_property
    def _fingerprint(self) -> str:
        return self.rows.fingerprint()

    def state(self) -> dict[str, Any]:
        """What decides the order, for the checkpoint: JSON."""
        return {
            "num_rows": len(self.rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raises UserError where a resume with this loader would skip rows or train rows twice."""
        now = self.state()
        for name, what_to_do in reversed(_WHAT_TO_DO.items()):
            if saved.get(name) != now[name]:
                raise UserError(
                    f"the checkpoint was made with data whose {name} was {saved.get(name)}, now it is {now[name]}: "
                    f"{what_to_do}, or start anew with trainer.resume_mode=never"
                )
