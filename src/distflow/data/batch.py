"""Columns over many samples, and transfers between host and device. Per-token columns are stored
flat (values + lengths), never padded at rest.

A device processes a queue. Copies from plain memory, and each number that is read, wait until the
queue is empty; copies from pinned memory do not wait, and many numbers read together wait once.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from distflow.data.sample import Sample
from distflow.device_transfer import send
from distflow.graph.fields import (
    ALIASES,
    DERIVED,
    STANDARD_FIELDS,
    TOKEN_AXES,
    Axis,
    Field,
    find_field,
)
from distflow.untrusted_files import check_tensors

Column = Tensor | list[object]
Written = Tensor | NDArray[np.generic] | Sequence[object]
Shapes = Mapping[Axis, tuple[tuple[int, ...], ...]]

_SAVED = {"format": "distflow batch"}
_DERIVED = {name: sources for name, sources in DERIVED.items() if name not in ("scores", "acc")}
"""Columns that are derived here from others unless written."""


class RemoteColumn(Protocol):
    """A column that other processes have. A batch passes it on without its values, and fetches
    them when they are read."""

    def read(self) -> Column:
        """Fetch the values."""

    def select(self, rows: Sequence[int]) -> "RemoteColumn":
        """The column of these samples."""

    def concat(self, others: "Sequence[RemoteColumn]") -> "RemoteColumn":
        """The column of these samples and the others', in order."""


class Batch:
    """Named columns over `len(batch)` samples.

    A column belongs to an axis: tokens of the prompt, the response or both (`sequence`), one entry
    per sample, or plain Python objects. `batch[name]` returns token columns padded as
    `(bs, longest)`, `batch.flat(name)` as stored. `input_ids`, `attention_mask`, `loss_mask`,
    `token_level_scores` and `token_level_rewards` are derived unless written.
    """

    def __init__(self, prompt_lengths: Tensor, response_lengths: Tensor) -> None:
        """prompt_lengths, response_lengths: int64 `(bs,)`, in tokens."""
        self._lengths = {Axis.PROMPT: prompt_lengths.long(), Axis.RESPONSE: response_lengths.long()}
        self._lengths[Axis.SEQUENCE] = self._lengths[Axis.PROMPT] + self._lengths[Axis.RESPONSE]
        self._columns: dict[str, Column | RemoteColumn] = {}
        self._fields: dict[str, Field] = {}
        self._places: dict[tuple[Axis, torch.device], Tensor] = {}

    @staticmethod
    def from_samples(samples: Sequence[Sample]) -> "Batch":
        """The standard columns of finished trajectories."""
        prompts = torch.tensor([len(s.prompt_ids) for s in samples], dtype=torch.int64)
        responses = torch.tensor(
            [sum(len(seg.token_ids) for seg in s.response_segments) for s in samples],
            dtype=torch.int64,
        )
        batch = Batch(prompts, responses)
        segments = [segment for s in samples for segment in s.response_segments]
        objects: dict[str, list[Any]] = {
            "uid": [s.uid for s in samples],
            "prompts": [s.prompt for s in samples],
            "responses": [s.response for s in samples],
            "domain": [s.domain for s in samples],
            "agent": [s.agent for s in samples],
            "ground_truth": [s.ground_truth for s in samples],
            "extra_info": [s.extra_info for s in samples],
            "finish_reason": [s.finish_reason for s in samples],
            "forks": [[list(fork) for fork in s.forks] for s in samples],
            "owners": [
                [[part.owner, len(part.token_ids)] for part in s.response_segments] for s in samples
            ],
            "conversation": [[dict(turn) for turn in s.conversation] for s in samples],
            "images": [_images(s) for s in samples],
        }
        batch._columns.update(objects)
        batch._fields.update((name, STANDARD_FIELDS[name]) for name in objects)
        # Segments have checked their lengths: these columns fit, and are stored as they are.
        of_samples: dict[str, list[Any]] = {
            "group_index": [s.group_index for s in samples],
            "episode_index": [s.episode for s in samples],
            "valid": [s.valid for s in samples],
            "truncated": [s.truncated for s in samples],
        }
        of_tokens: dict[str, list[Sequence[float]]] = {
            "prompt_ids": [s.prompt_ids for s in samples],
            "response_ids": [seg.token_ids for seg in segments],
            "response_mask": [
                [float(seg.owner == "policy")] * len(seg.token_ids) for seg in segments
            ],
            "versions": [seg.versions or [-1] * len(seg.token_ids) for seg in segments],
            "rollout_log_probs": [
                seg.rollout_log_probs or [0.0] * len(seg.token_ids) for seg in segments
            ],
            "sampling_log_probs": [
                seg.sampling_log_probs or [0.0] * len(seg.token_ids) for seg in segments
            ],
        }
        for name, values in of_samples.items():
            field = STANDARD_FIELDS[name]
            batch._columns[name] = torch.from_numpy(np.array(values, field.dtype))
            batch._fields[name] = field
        for name, parts in of_tokens.items():
            field = STANDARD_FIELDS[name]
            batch._columns[name] = _flat_tensor(parts, np.dtype(field.dtype))
            batch._fields[name] = field
        if any(s.head for s in samples):
            batch["number_head"] = [s.head and dict(s.head) for s in samples]
            batch["action_values"] = _flat_tensor(
                [seg.values or [0.0] * len(seg.token_ids) for seg in segments], np.float32
            )
        return batch

    def __len__(self) -> int:
        return int(self._lengths[Axis.PROMPT].numel())

    def __contains__(self, name: object) -> bool:
        name = ALIASES.get(str(name), str(name))
        return name in self._columns or (
            name in _DERIVED and all(other in self for other in _DERIVED[name])
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The stored columns, in the order in which they were first written."""
        return tuple(self._columns)

    def lengths(self, axis: Axis | str) -> Tensor:
        """Tokens of each sample on a token axis: int64 `(bs,)`."""
        return self._lengths[Axis(axis)]

    def field(self, name: str) -> Field:
        """The column's field. Raises KeyError if there is no such column."""
        name = ALIASES.get(name, name)
        if name in self._fields:
            return self._fields[name]
        known = find_field(name)
        if known is None or name not in self:
            raise KeyError(f"the batch has no column '{name}'; it has {', '.join(self._columns)}")
        return known

    def __getitem__(self, name: str) -> Any:
        field = self.field(name)
        return (
            self.pad(self.flat(name), field.axis) if field.axis in TOKEN_AXES else self.flat(name)
        )

    def flat(self, name: str) -> Any:
        """The column as stored: all tokens of all samples in one `(tokens,)` tensor, `(bs,)` for
        samples, or a list."""
        name = ALIASES.get(name, name)
        if name in self._columns:
            return _read(self._columns[name])
        self.field(name)
        if name == "input_ids":
            return self._interleave(self.flat("prompt_ids"), self.flat("response_ids"))
        if name == "attention_mask":
            num_tokens = int(self._lengths[Axis.SEQUENCE].sum())
            device = self.flat("prompt_ids").device
            return torch.ones(num_tokens, dtype=torch.float32, device=device)
        if name == "token_level_rewards":
            return self.flat("token_level_scores")
        if name == "in_baselines":
            return self.flat("valid")
        return self._derived_loss_mask() if name == "loss_mask" else self._placed_scores()

    def pad(self, values: Tensor, axis: Axis | str) -> Tensor:
        """Spread flat `(tokens,)` values over `(bs, longest)`, with 0 elsewhere; keeps the
        gradient."""
        lengths = self._lengths[Axis(axis)]
        longest = int(lengths.max()) if len(self) else 0
        padded = torch.zeros(len(self) * longest, dtype=values.dtype, device=values.device)
        return padded.index_copy_(0, self._padded_places(Axis(axis), values.device), values).view(
            len(self), longest
        )

    def mask(self, axis: Axis | str) -> Tensor:
        """bool `(bs, longest)`: where a padded token column has a token."""
        lengths = self._lengths[Axis(axis)]
        longest = int(lengths.max()) if len(self) else 0
        return torch.arange(longest)[None, :] < lengths[:, None]

    def __setitem__(self, name: str, value: Written) -> None:
        """Write a column: flat or padded tensor, `(bs,)` tensor, or a list of objects.

        Raises ValueError if the shape does not fit. The axis of an unregistered name is inferred
        from the shape if that fits exactly one.
        """
        name = ALIASES.get(name, name)
        field = (
            find_field(name) or self._fields.get(name) or _guess_field(name, value, self._shapes())
        )
        self._columns[name] = self._stored(field, value)
        self._fields[name] = field

    def keep_derived(self, *names: str) -> None:
        """Store these columns if they can be derived, so that they are derived only once."""
        for name in names:
            if name in self:
                field = self.field(name)
                self._columns[name] = self.flat(name)
                self._fields[name] = field

    def select(self, indices: Tensor | Sequence[int]) -> "Batch":
        """The samples at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64).reshape(-1)
        out = Batch(self._lengths[Axis.PROMPT][index], self._lengths[Axis.RESPONSE][index])
        rows = index.tolist()
        tokens = {
            axis: _ranges((of.cumsum(0) - of)[index], of[index])
            for axis, of in self._lengths.items()
        }
        for name, column in self._columns.items():
            field = self._fields[name]
            picked: Column | RemoteColumn
            if isinstance(column, list):
                picked = [column[i] for i in rows]
            elif not isinstance(column, Tensor):
                picked = column.select(rows)
            elif field.axis in TOKEN_AXES:
                picked = column[tokens[field.axis]]
            else:
                picked = column[index]
            out._columns[name] = picked
            out._fields[name] = field
        return out

    def to(self, device: torch.device | str) -> "Batch":
        """The same samples with their tensors on `device`; lengths stay on the CPU, where they are
        used."""
        out = self.copy()
        where = torch.device(device)
        for name, stored in self._columns.items():
            column = _read(stored)
            out._columns[name] = column if isinstance(column, list) else send(column, where)
        return out

    def chunk(self, num_chunks: int) -> list["Batch"]:
        """At most `num_chunks` runs of neighbouring samples, as even as possible."""
        return [
            self.select(part)
            for part in torch.arange(len(self)).tensor_split(num_chunks)
            if part.numel()
        ]

    def copy(self) -> "Batch":
        """A batch with the same columns, which may get others."""
        out = Batch.__new__(Batch)
        # of the same samples
        out._lengths = self._lengths
        out._places = self._places
        out._columns = {**self._columns}
        out._fields = {**self._fields}
        return out

    def only(self, names: Iterable[str]) -> "Batch":
        """A batch with just these stored columns."""
        out = Batch(self._lengths[Axis.PROMPT], self._lengths[Axis.RESPONSE])
        for name in names:
            name = ALIASES.get(name, name)
            is_stored = name in self._columns
            out._columns[name] = self._columns[name] if is_stored else self.flat(name)
            out._fields[name] = self._fields[name] if is_stored else self.field(name)
        return out

    def copy_columns(self, other: "Batch", **names: str) -> None:
        """Write columns of another batch over the same samples, by their names here:
        `batch.copy_columns(scored, old_log_probs="log_probs")`. Raises ValueError if the samples
        differ in length."""
        self._check_same_samples(other)
        for name, theirs in names.items():
            theirs = ALIASES.get(theirs, theirs)
            field = replace(other.field(theirs), name=ALIASES.get(name, name))
            if theirs in other._columns and find_field(field.name) in (None, field):
                self._columns[field.name] = other._columns[theirs]
                self._fields[field.name] = field
            else:
                self[name] = other.flat(theirs)

    def columns(self) -> Iterator[tuple[Field, Column | RemoteColumn]]:
        """The stored columns, those of other processes without their values."""
        for name, column in self._columns.items():
            yield self._fields[name], column

    def merge(self, other: "Batch") -> "Batch":
        """All columns of both batches; if both have one, the other's.

        Raises ValueError if the samples differ in length, or a column in dtype or axis.
        """
        self._check_same_samples(other)
        out = self.copy()
        _check_same_fields(self._fields, other._fields)
        out._columns.update(other._columns)
        out._fields.update(other._fields)
        return out

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """All samples of all batches in order. Raises ValueError if their columns differ in name,
        dtype or axis."""
        if not batches:
            raise ValueError("concat needs at least one batch")
        names = set(batches[0].names)
        for other in batches[1:]:
            if set(other.names) != names:
                raise ValueError(
                    f"batches with different columns: {sorted(names ^ set(other.names))} not in all"
                )
            _check_same_fields(batches[0]._fields, other._fields)
        out = Batch(
            torch.cat([b._lengths[Axis.PROMPT] for b in batches]),
            torch.cat([b._lengths[Axis.RESPONSE] for b in batches]),
        )
        for name in batches[0].names:
            out._columns[name] = _joined([b._columns[name] for b in batches])
            out._fields[name] = batches[0]._fields[name]
        return out

    def save(self, path: Path) -> None:
        """Write to one safetensors file. Raises TypeError for an object that is not a JSON
        value."""
        save_file(self.to_tensors(), path, metadata=_SAVED)

    @staticmethod
    def is_saved(path: Path) -> bool:
        """Whether `save` wrote the file, by its header."""
        try:
            with safe_open(check_tensors(path, path.parent), "pt") as file:
                return bool(file.metadata() == _SAVED)
        except (OSError, SafetensorError):
            return False

    @staticmethod
    def load(path: Path) -> "Batch":
        """Read what `save` wrote."""
        return Batch.from_tensors(load_file(check_tensors(path, path.parent)))

    def to_tensors(self) -> dict[str, Tensor]:
        """The whole batch as tensors by name; objects and fields as JSON in bytes.

        Raises TypeError for an object that is not a JSON value.
        """
        tensors = {
            "lengths.prompt": self._lengths[Axis.PROMPT],
            "lengths.response": self._lengths[Axis.RESPONSE],
        }
        header = []
        for name, stored in self._columns.items():
            field = self._fields[name]
            column = _read(stored)
            header.append([name, field.dtype, field.axis.value])
            if isinstance(column, list):
                tensors[f"column.{name}"] = _json_bytes(column)
            else:
                # two may share storage
                tensors[f"column.{name}"] = column.clone(memory_format=torch.contiguous_format)
        return {**tensors, "fields": _json_bytes(header)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> "Batch":
        """The batch from the result of `to_tensors`, or from the bytes of its tensors."""
        columns: list[tuple[Field, Column]] = []
        for name, dtype, axis in _from_json_bytes(tensors["fields"]):
            stored = tensors[f"column.{name}"]
            is_object = axis == Axis.OBJECT.value
            column = _from_json_bytes(stored) if is_object else stored.view(getattr(torch, dtype))
            columns.append((Field(name, dtype, Axis(axis)), column))
        prompts, responses = (
            tensors[f"lengths.{axis}"].view(torch.int64) for axis in ("prompt", "response")
        )
        return Batch.from_columns(prompts, responses, columns)

    @staticmethod
    def from_columns(
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        columns: Iterable[tuple[Field, Column | RemoteColumn]],
    ) -> "Batch":
        """A batch from another batch's stored columns, without guesses, copies or checks."""
        batch = Batch(prompt_lengths, response_lengths)
        for field, column in columns:
            batch._columns[field.name] = column
            batch._fields[field.name] = field
        return batch

    def _check_same_samples(self, other: "Batch") -> None:
        if any(not torch.equal(self._lengths[axis], other._lengths[axis]) for axis in TOKEN_AXES):
            raise ValueError(
                "batches over different samples cannot be merged: their lengths differ"
            )

    def _stored(self, field: Field, value: Written) -> Column:
        if field.axis is Axis.OBJECT:
            values = list(value)
            if len(values) != len(self):
                raise ValueError(
                    f"column '{field.name}' has {len(values)} entries for {len(self)} samples"
                )
            return values
        try:
            tensor = torch.as_tensor(value, dtype=getattr(torch, field.dtype)).detach()
        except (TypeError, ValueError, RuntimeError) as err:  # str, None, ragged lists
            raise ValueError(f"column '{field.name}' takes numbers: {err}") from err
        if field.axis is Axis.SAMPLE:
            if tensor.shape != (len(self),):
                raise ValueError(
                    f"column '{field.name}' has shape {tuple(tensor.shape)}, wanted ({len(self)},)"
                )
            return tensor
        return self._flatten(field, tensor)

    def _flatten(self, field: Field, tensor: Tensor) -> Tensor:
        num_tokens = int(self._lengths[field.axis].sum())
        if tensor.shape == (num_tokens,):
            return tensor
        mask = self.mask(field.axis)
        if tensor.shape == mask.shape:
            return tensor[mask]
        raise ValueError(
            f"column '{field.name}' is per {field.axis.value} token: it has shape "
            f"{tuple(tensor.shape)}, expected "
            f"{tuple(mask.shape)} padded or ({num_tokens},) flat"
        )

    def _shapes(self) -> Shapes:
        """The possible shapes of a column of each axis: padded or flat if it has tokens."""
        masks = {axis: self.mask(axis) for axis in TOKEN_AXES}
        tokens = {axis: (tuple(mask.shape), (int(mask.sum()),)) for axis, mask in masks.items()}
        return {Axis.SAMPLE: ((len(self),),), **tokens}

    def _padded_places(self, axis: Axis, device: torch.device) -> Tensor:
        """Position of each token of a flat column in the flattened padded one: int64 `(tokens,)`,
        computed once."""
        if (axis, device) not in self._places:
            self._places[axis, device] = send(self.mask(axis).reshape(-1).nonzero()[:, 0], device)
        return self._places[axis, device]

    def _interleave(self, prompt: Tensor, response: Tensor) -> Tensor:
        is_response = torch.zeros(int(self._lengths[Axis.SEQUENCE].sum()), dtype=torch.bool)
        is_response[self.response_positions()] = True
        source = torch.empty(is_response.shape, dtype=torch.int64)
        source[is_response] = len(prompt) + torch.arange(len(response))
        source[~is_response] = torch.arange(len(prompt))
        return torch.cat([prompt, response])[send(source, prompt.device)]

    def rows(self, axis: Axis | str = Axis.RESPONSE) -> Tensor:
        """The row of each token of the axis: int64 `(tokens,)`."""
        return repeated(torch.arange(len(self)), self._lengths[Axis(axis)])

    def response_positions(self) -> Tensor:
        """Position of each response token in the flat `sequence` columns: int64
        `(response tokens,)`."""
        responses = self._lengths[Axis.RESPONSE]
        return _ranges(self._lengths[Axis.SEQUENCE].cumsum(0) - responses, responses)

    def conversation_lengths(self) -> Tensor:
        """Tokens of each conversation of each sample, one after another: int64 `(conversations,)`.
        A conversation attends to no other, even of its own episode."""
        if "forks" not in self or not any(forks := self.flat("forks")):
            return self._lengths[Axis.SEQUENCE]
        prompts, lengths = (self._lengths[axis].tolist() for axis in (Axis.PROMPT, Axis.SEQUENCE))
        ends = [
            [0, *(prompt + start for _, start in own), length]
            for prompt, length, own in zip(prompts, lengths, forks, strict=True)
        ]
        return torch.tensor(
            [after - before for own in ends for before, after in pairwise(own)], dtype=torch.int64
        )

    @property
    def row_names(self) -> list[str]:
        """A name of each sample: its uid, with the number of the decision if it is one (see
        `by_decision`)."""
        if "decision" not in self:
            return list(self.flat("uid"))
        return [
            f"{uid}/{number}"
            for uid, number in zip(self.flat("uid"), self.flat("decision").tolist(), strict=True)
        ]

    def by_decision(self) -> "tuple[Batch, Tensor]":
        """Each conversation of each sample as a sample of its own, and the place of each of its
        response tokens in the flat response columns here: int64 `(tokens,)`.

        Its prompt is what was given before its first reply, by `turn_index`; what is no token is
        the sample's, even the uid. `decision`: its number in the sample.
        """
        lengths = self.conversation_lengths()
        is_drawn = torch.zeros(int(self._lengths[Axis.SEQUENCE].sum())).bool()
        positions = self.response_positions()
        starts = lengths.cumsum(0) - lengths
        is_drawn[positions] = self.flat("turn_index").cpu() >= 0
        given = [int((own.cumsum(0) == 0).sum()) for own in is_drawn.split(lengths.tolist())]
        prompts = torch.tensor(given, dtype=torch.int64)
        out = Batch(prompts, lengths - prompts)
        place_of = torch.full(is_drawn.shape, -1)
        place_of[positions] = torch.arange(len(positions))
        places = place_of[_ranges(starts + prompts, lengths - prompts)]
        numbers = (
            [1 + len(own) for own in self.flat("forks")] if "forks" in self else [1] * len(self)
        )
        rows = [(row, number) for row, count in enumerate(numbers) for number in range(count)]
        own_rows = torch.tensor([row for row, _ in rows], dtype=torch.int64)
        for name, stored in self._columns.items():
            column = _read(stored)
            axis = self._fields[name].axis
            if name == "images":
                out[name] = [self[name][row][number : number + 1] for row, number in rows]
            elif isinstance(column, list):
                out[name] = [() if name == "forks" else column[row] for row, _ in rows]
            elif axis is Axis.PROMPT:
                out[name] = self.flat("input_ids")[_ranges(starts, prompts)]
            else:
                index = places if axis is Axis.RESPONSE else own_rows
                out[name] = column if axis is Axis.SEQUENCE else column[send(index, column.device)]
            out._fields[name] = self._fields[name]
        out["decision"] = torch.tensor([number for _, number in rows], dtype=torch.int64)
        return out, places

    def speakers(self, agents: Sequence[str]) -> Tensor:
        """The index of the agent in whose conversation each response token is: int64
        `(response tokens,)`. A conversation without an agent's name is the first agent's."""
        index = list[Tensor]()
        known = {name: number for number, name in enumerate(agents)}
        for length, forks in zip(self._lengths[Axis.RESPONSE].tolist(), self["forks"], strict=True):
            ends = [*(start for _, start in forks), length]
            owners = [0, *(known.get(name.partition(".")[0], 0) for name, _ in forks)]
            lengths = [end - start for start, end in pairwise([0, *ends])]
            index.append(repeated(torch.tensor(owners), torch.tensor(lengths)))
        return torch.cat([*index, torch.zeros(0, dtype=torch.int64)])

    def _derived_loss_mask(self) -> Tensor:
        mask: Tensor = self.flat("response_mask")
        if "valid" not in self._columns:
            return mask
        valid: Tensor = self.flat("valid")
        return mask * repeated(valid.to(mask.dtype), self._lengths[Axis.RESPONSE])

    def _placed_scores(self) -> Tensor:
        """The score of a sample, on the last token of the policy: flat `(response tokens,)`.

        Not on a later token of a tool or environment: estimators read only rewards of the policy's
        tokens.
        """
        mask: Tensor = self.flat("response_mask")
        # NumPy takes a tenth of torch's time for the few tokens of a prompt group.
        positions = np.flatnonzero(mask.cpu().numpy() > 0)
        ends = self._lengths[Axis.RESPONSE].numpy().cumsum()
        # tokens of the policy up to the end of the sample
        before = np.searchsorted(positions, ends)
        answered = np.diff(before, prepend=0) > 0
        scores = self.flat("scores").double().cpu().numpy()
        placed = np.zeros(len(mask), dtype=np.float64)
        placed[positions[before[answered] - 1]] = scores[answered]
        return send(torch.from_numpy(placed), mask.device)


def _images(sample: Sample) -> list[list[str]]:
    """The images of the prompt of each conversation; empty if none has any."""
    begins = {start for _, start in sample.forks}
    found = [list(sample.segments[0].images)]
    length = 0
    for segment in sample.response_segments:
        if length in begins:
            begins.discard(length)
            found.append(list(segment.images))
        length += len(segment.token_ids)
    return found if any(found) else []


def _read(column: Column | RemoteColumn) -> Column:
    return column if isinstance(column, Tensor | list) else column.read()


def _joined(parts: Sequence[Column | RemoteColumn]) -> Column | RemoteColumn:
    """One column from many, all tensors or all lists. Remote columns are fetched only if some of
    the others are here."""
    remote = [part for part in parts if not isinstance(part, Tensor | list)]
    if parts and len(remote) == len(parts):
        return remote[0].concat(remote[1:])
    here = [_read(part) for part in parts]
    tensors = [part for part in here if isinstance(part, Tensor)]
    return torch.cat(tensors) if tensors else [value for part in here for value in part]


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The `lengths[i]` consecutive numbers from each `starts[i]` on: int64 `(sum of lengths,)`."""
    return repeated(starts - lengths.cumsum(0) + lengths, lengths) + torch.arange(
        int(lengths.sum())
    )


def repeated(values: Tensor, counts: Tensor) -> Tensor:
    """Each value as often as its count. On the CPU without `repeat_interleave`, which wakes all of
    torch's threads for any size. counts: on the CPU."""
    if values.device.type != "cpu":
        return values.repeat_interleave(send(counts, values.device), output_size=int(counts.sum()))
    return torch.from_numpy(np.repeat(values.detach().numpy(), counts.numpy()))


def _json_bytes(value: list[Any]) -> Tensor:
    return torch.frombuffer(
        bytearray(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
        dtype=torch.uint8,
    )


def _from_json_bytes(tensor: Tensor) -> list[Any]:
    return json.loads(bytes(tensor.cpu().numpy()).decode("utf-8", "surrogatepass"))


def _flat_tensor(parts: Iterable[Iterable[float]], dtype: DTypeLike) -> Tensor:
    # a third of the time of `torch.tensor`
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), dtype))


def _guess_field(name: str, value: Written, shapes: Shapes) -> Field:
    """The field of an unregistered column, inferred from its shape; plain objects if it has none.

    shapes: possible shapes by axis. Raises ValueError if the shape fits none or several.
    """
    if not isinstance(value, Tensor | np.ndarray):
        return Field(name, "object", Axis.OBJECT)
    tensor = torch.as_tensor(value)
    shape = tuple(tensor.shape)
    fitting = [axis for axis, wanted in shapes.items() if shape in wanted]
    if len(fitting) == 1:
        return Field(name, str(tensor.dtype).removeprefix("torch."), fitting[0])
    found = "; ".join(
        f"{axis.value}: {' or '.join(map(str, shapes[axis]))}" for axis in fitting or shapes
    )
    raise ValueError(
        f"column '{name}' of shape {shape} fits {'more than one' if fitting else 'no'} axis of "
        f"this batch ({found}): "
        f"declare it once with register_field('{name}', dtype=..., axis=...)"
    )


def _check_same_fields(ours: Mapping[str, Field], theirs: Mapping[str, Field]) -> None:
    """Raises ValueError if a column that both have differs in dtype or axis."""
    different = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if different:
        name = different[0]
        raise ValueError(
            f"column '{name}' is {ours[name]} in one batch and {theirs[name]} in another: write "
            "the same in both, "
            f"or declare it with register_field('{name}', dtype=..., axis=...)"
        )
