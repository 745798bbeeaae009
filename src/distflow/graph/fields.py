"""The columns of a batch: their names, dtypes and axes. Pipelines add columns with
`register_field`."""

import tomllib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Axis(Enum):
    """The unit that one entry of a column belongs to. `RESPONSE` is everything after the first
    prompt."""

    PROMPT = "prompt"
    RESPONSE = "response"
    SEQUENCE = "sequence"
    SAMPLE = "sample"
    OBJECT = "object"

    __hash__ = object.__hash__  # the enum's own is slow, and batches look up their lengths by it


TOKEN_AXES = (Axis.PROMPT, Axis.RESPONSE, Axis.SEQUENCE)


@dataclass(frozen=True)
class Field:
    """A column. `dtype` is torch's name of it ("float32", "int64", "bool"), or "object" for plain
    Python values.

    Fields are equal if name, dtype and axis are.
    """

    name: str
    dtype: str
    axis: Axis
    doc: str = field(default="", compare=False)
    many: bool = field(default=False, compare=False)
    """Each token has several entries: the column has a second dimension."""

    def __str__(self) -> str:
        return f"{self.dtype} per {self.axis.value}"


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
STANDARD_FIELDS = {
    name: Field(name, dtype, Axis(axis), doc, *many)
    for name, (dtype, axis, doc, *many) in _TABLE.items()
}

ALIASES = {"index": "group_index", "data_source": "domain"}

# Columns that are derived if no node writes them, and their sources.
DERIVED = {
    "input_ids": ("prompt_ids", "response_ids"),
    "attention_mask": ("prompt_ids", "response_ids"),
    "loss_mask": ("response_mask",),
    "in_baselines": ("valid",),
    "scores": ("token_level_scores",),
    "acc": ("scores",),
    "token_level_scores": ("scores", "response_mask"),
    "token_level_rewards": ("token_level_scores",),
}


def canonical(name: str) -> str:
    """The field's own name for an alias: `index` is `group_index`."""
    return ALIASES.get(name, name)


_registered: dict[str, Field] = {}


def register_field(
    name: str, dtype: str = "float32", axis: Axis | str = Axis.RESPONSE, doc: str = ""
) -> Field:
    """Add a custom column. Raises ValueError if the name already means another column."""
    wanted = Field(name, dtype, Axis(axis), doc)
    known = find_field(name)
    if known is None:
        _registered[name] = wanted
        return wanted

    if known != wanted:
        raise ValueError(f"field '{name}' is already {known}; choose another name")
    return known


def find_field(name: str) -> Field | None:
    """The field of that name (aliases resolved), standard or registered."""
    name = canonical(name)
    return STANDARD_FIELDS.get(name) or _registered.get(name)
