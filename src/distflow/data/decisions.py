"""Conversations of samples as samples of their own, for losses that count each decision alike."""

import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, RemoteColumn, ranges, repeated
from distflow.device_transfer import send
from distflow.graph.fields import Axis, Field


def by_decision(batch: Batch) -> tuple[Batch, Tensor]:
    """Each conversation of each sample as a sample of its own, and the place of each of its
    response tokens in the batch's flat response columns: int64 `(tokens,)`.

    Its prompt is what was given before its first reply, by `turn_index`; what is no token is the
    sample's, even the uid. `decision`: its number in the sample.
    """
    lengths = batch.conversation_lengths()
    starts = lengths.cumsum(0) - lengths
    prompts = _num_given(batch, lengths)
    places = _response_places(batch)[ranges(starts + prompts, lengths - prompts)]
    forks = batch.flat("forks") if "forks" in batch else [()] * len(batch)
    counts = torch.tensor([1 + len(own) for own in forks], dtype=torch.int64)
    rows = repeated(torch.arange(len(batch)), counts)
    numbers = ranges(torch.zeros_like(counts), counts)

    columns: list[tuple[Field, Column | RemoteColumn]] = []
    for field, _ in batch.columns():
        column = batch.flat(field.name)
        if field.name == "images":
            pairs = zip(rows.tolist(), numbers.tolist(), strict=True)
            column = [column[row][number : number + 1] for row, number in pairs]
        elif field.name == "forks":
            column = [()] * len(rows)
        elif field.axis is Axis.OBJECT:
            column = [column[row] for row in rows.tolist()]
        elif field.axis is Axis.PROMPT:
            column = batch.flat("input_ids")[ranges(starts, prompts)]
        elif field.axis is Axis.RESPONSE:
            column = column[send(places, column.device)]
        elif field.axis is Axis.SAMPLE:
            column = column[send(rows, column.device)]

        columns.append((field, column))

    apart = Batch.from_columns(prompts, lengths - prompts, columns)
    apart["decision"] = numbers
    return apart, places


def _num_given(batch: Batch, lengths: Tensor) -> Tensor:
    """The tokens of each conversation before its first reply: int64 `(conversations,)`."""
    is_drawn = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    is_drawn[batch.response_positions()] = batch.flat("turn_index").cpu() >= 0
    given = [int((own.cumsum(0) == 0).sum()) for own in is_drawn.split(lengths.tolist())]
    return torch.tensor(given, dtype=torch.int64)


def _response_places(batch: Batch) -> Tensor:
    """The place in the flat response columns of each token, -1 in prompts: int64 `(tokens,)`."""
    positions = batch.response_positions()
    places = torch.full((int(batch.lengths("sequence").sum()),), -1)
    places[positions] = torch.arange(len(positions))
    return places
