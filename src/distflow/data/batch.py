"""Columns over many samples, and transfers between host and device. Per-token columns are stored
flat (values + lengths), never padded at rest.

A device processes a queue. Copies from plain memory, and each number that is read, wait until the
queue is empty; copies from pinned memory do not wait, and many numbers read together wait once.
"""

import json
import math
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

from distflow.data.sample import Sample, Segment
from distflow.device_transfer import send
from distflow.errors import UserError
from distflow.graph.fields import (
    DERIVED,
    STANDARD_FIELDS,
    TOKEN_AXES,
    Axis,
    Field,
    canonical,
    find_field,
)
from distflow.untrusted_files import check_tensors

Column = Tensor | list[object]
Written = Tensor | NDArray[np.generic] | Sequence[object]
Shapes = Mapping[Axis, tuple[tuple[int, ...], ...]]

_SAVED = {"format": "distflow batch"}
_OF_SAMPLES = {
    "uid": "uid",
    "prompts": "prompt",
    "responses": "response",
    "domain": "domain",
    "agent": "agent",
    "ground_truth": "ground_truth",
    "extra_info": "extra_info",
    "finish_reason": "finish_reason",
    "group_index": "group_index",
    "episode_index": "episode",
    "valid": "valid",
    "truncated": "truncated",
    "prompt_ids": "prompt_ids",
}
"""Columns that are attributes of samples."""
_OF_DRAWN_TOKENS = {"versions": -1, "rollout_log_probs": 0.0, "sampling_log_probs": 0.0}
"""Columns that are attributes of segments, with the value on tokens that the policy did not
draw."""
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
        prompts = prompt_lengths.long()
        responses = response_lengths.long()
        self._lengths = {
            Axis.PROMPT: prompts,
            Axis.RESPONSE: responses,
            Axis.SEQUENCE: prompts + responses,
        }
        self._columns: dict[str, tuple[Field, Column | RemoteColumn]] = {}
        self._places: dict[tuple[Axis, torch.device], Tensor] = {}

    @staticmethod
    def from_samples(samples: Sequence[Sample], num_top: int = 0) -> "Batch":
        """The standard columns of finished trajectories. num_top: the likeliest tokens that the
        engine recorded for each drawn token. Raises UserError if it recorded fewer."""
        owners = list[list[object]]()
        """Of each sample, by segment: who wrote it, and its tokens."""
        responses = list[int]()
        for s in samples:
            owners.append([[part.owner, len(part.token_ids)] for part in s.response_segments])
            responses.append(sum(len(part.token_ids) for part in s.response_segments))

        batch = Batch(
            torch.tensor([len(s.prompt_ids) for s in samples], dtype=torch.int64),
            torch.tensor(responses, dtype=torch.int64),
        )
        for name, attribute in _OF_SAMPLES.items():
            batch._put(name, [getattr(s, attribute) for s in samples])
        batch._put("forks", [[list(fork) for fork in s.forks] for s in samples])
        batch._put("conversation", [[dict(turn) for turn in s.conversation] for s in samples])
        batch._put("images", [_images(s) for s in samples])
        batch._put("owners", owners)

        segments = list(chain.from_iterable(s.response_segments for s in samples))
        batch._put_segments(segments)
        if num_top:
            batch._put_top(segments, num_top)
        if any(s.head for s in samples):
            batch["number_head"] = [s.head and dict(s.head) for s in samples]
            values = [seg.values or [0.0] * len(seg.token_ids) for seg in segments]
            batch["action_values"] = _flat_tensor(values, np.float32)

        return batch

    def _put_segments(self, segments: Sequence[Segment]) -> None:
        """Store the columns of response tokens. segments: of all samples, in order."""
        self._put("response_ids", [seg.token_ids for seg in segments])
        is_drawn = [[float(seg.owner == "policy")] * len(seg.token_ids) for seg in segments]
        self._put("response_mask", is_drawn)

        for name, missing in _OF_DRAWN_TOKENS.items():
            found = [getattr(seg, name) or [missing] * len(seg.token_ids) for seg in segments]
            self._put(name, found)

    def _put_top(self, segments: Sequence[Segment], num_top: int) -> None:
        """Store the sampler's likeliest tokens; where nothing was drawn, they are improbable."""
        for name, missing in (("top_ids", 0), ("top_log_probs", -math.inf)):
            rows = list[tuple[float, ...]]()
            for seg in segments:
                if seg.rollout_log_probs and not seg.top_ids:
                    raise UserError(
                        f"the rollout engine does not record the {num_top} likeliest tokens of "
                        "each draw: set actor_rollout_ref.rollout.name=embedded or hf"
                    )
                rows += getattr(seg, name) or [(missing,) * num_top] * len(seg.token_ids)

            field = STANDARD_FIELDS[name]
            column = _flat_tensor(rows, np.dtype(field.dtype))
            self._columns[name] = field, column.view(len(rows), num_top)

    def _put(self, name: str, values: list[Any]) -> None:
        """Store a standard column whose length is right: segments have checked theirs."""
        field = STANDARD_FIELDS[name]
        column: Column = values
        if field.axis is Axis.SAMPLE:
            column = torch.from_numpy(np.array(values, field.dtype))
        elif field.axis in TOKEN_AXES:
            column = _flat_tensor(values, np.dtype(field.dtype))

        self._columns[name] = field, column

    def __len__(self) -> int:
        return int(self._lengths[Axis.PROMPT].numel())

    def __contains__(self, name: object) -> bool:
        name = canonical(str(name))
        if name in self._columns:
            return True
        return name in _DERIVED and all(other in self for other in _DERIVED[name])

    @property
    def names(self) -> tuple[str, ...]:
        """The stored columns, in the order in which they were first written."""
        return tuple(self._columns)

    def lengths(self, axis: Axis | str) -> Tensor:
        """Tokens of each sample on a token axis: int64 `(bs,)`."""
        return self._lengths[Axis(axis)]

    def field(self, name: str) -> Field:
        """The column's field. Raises KeyError if there is no such column."""
        name = canonical(name)
        if name in self._columns:
            return self._columns[name][0]

        known = find_field(name)
        if known is None or name not in self:
            raise KeyError(f"the batch has no column '{name}'; it has {', '.join(self._columns)}")
        return known

    def __getitem__(self, name: str) -> Any:
        axis = self.field(name).axis
        values = self.flat(name)
        if axis in TOKEN_AXES:
            return self.pad(values, axis)
        return values

    def flat(self, name: str) -> Any:
        """The column as stored: all tokens of all samples in one `(tokens,)` tensor, `(bs,)` for
        samples, or a list."""
        name = canonical(name)
        if name in self._columns:
            return _read(self._columns[name][1])

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
        if name == "loss_mask":
            return self._derived_loss_mask()

        return self._placed_scores()

    def pad(self, values: Tensor, axis: Axis | str) -> Tensor:
        """Spread flat `(tokens,)` values over `(bs, longest)`, with 0 elsewhere; keeps the
        gradient. Several entries of a token stay together, `(bs, longest, entries)`."""
        places = self._padded_places(Axis(axis), values.device)
        lengths = self._lengths[Axis(axis)]
        longest = int(lengths.max()) if len(self) else 0
        entries = values.shape[1:]
        padded = values.new_zeros(len(self) * longest, *entries)
        return padded.index_copy_(0, places, values).view(len(self), longest, *entries)

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
        name = canonical(name)
        field = find_field(name)
        if field is None and name in self._columns:
            field = self._columns[name][0]
        if field is None:
            field = _guess_field(name, value, self._shapes())
        self._columns[name] = field, self._stored(field, value)

    def keep_derived(self, *names: str) -> None:
        """Store these columns if they can be derived, so that they are derived only once."""
        for name in names:
            if name in self:
                self._columns[name] = self.field(name), self.flat(name)

    def select(self, indices: Tensor | Sequence[int]) -> "Batch":
        """The samples at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64).reshape(-1)
        out = Batch(self._lengths[Axis.PROMPT][index], self._lengths[Axis.RESPONSE][index])
        rows = index.tolist()
        tokens: dict[Axis, Tensor] = {}
        for axis, lengths in self._lengths.items():
            tokens[axis] = ranges((lengths.cumsum(0) - lengths)[index], lengths[index])

        for name, (field, column) in self._columns.items():
            picked: Column | RemoteColumn
            if isinstance(column, list):
                picked = [column[i] for i in rows]
            elif not isinstance(column, Tensor):
                picked = column.select(rows)
            else:
                picked = column[tokens.get(field.axis, index)]

            out._columns[name] = field, picked

        return out

    def to(self, device: torch.device | str) -> "Batch":
        """The same samples with their tensors on `device`; lengths stay on the CPU, where they are
        used."""
        out = self.copy()
        where = torch.device(device)
        for name, (field, stored) in self._columns.items():
            column = _read(stored)
            out._columns[name] = field, column if isinstance(column, list) else send(column, where)
        return out

    def chunk(self, num_chunks: int) -> list["Batch"]:
        """At most `num_chunks` runs of neighbouring samples, as even as possible."""
        parts = torch.arange(len(self)).tensor_split(num_chunks)
        return [self.select(part) for part in parts if part.numel()]

    def copy(self) -> "Batch":
        """A batch with the same columns, which may get others."""
        out = Batch.__new__(Batch)
        # of the same samples
        out._lengths = self._lengths
        out._places = self._places
        out._columns = {**self._columns}
        return out

    def only(self, names: Iterable[str]) -> "Batch":
        """A batch with just these stored columns."""
        out = Batch(self._lengths[Axis.PROMPT], self._lengths[Axis.RESPONSE])
        for name in map(canonical, names):
            stored = self._columns.get(name)
            out._columns[name] = stored or (self.field(name), self.flat(name))
        return out

    def columns(self) -> Iterator[tuple[Field, Column | RemoteColumn]]:
        """The stored columns, those of other processes without their values."""
        yield from self._columns.values()

    def copy_columns(self, other: "Batch", **names: str) -> None:
        """Write columns of another batch over the same samples, by their names here:
        `batch.copy_columns(scored, old_log_probs="log_probs")`. Raises ValueError if the samples
        differ in length."""
        self._check_same_samples(other)
        for name, theirs in names.items():
            field = replace(other.field(theirs), name=canonical(name))
            stored = other._columns.get(canonical(theirs))
            if stored is not None and find_field(field.name) in (None, field):
                self._columns[field.name] = field, stored[1]
            else:
                self[name] = other.flat(theirs)

    def merge(self, other: "Batch") -> "Batch":
        """All columns of both batches; if both have one, the other's.

        Raises ValueError if the samples differ in length, or a column in dtype or axis.
        """
        self._check_same_samples(other)
        self._check_same_fields(other)
        out = self.copy()
        out._columns.update(other._columns)
        return out

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """All samples of all batches in order. Raises ValueError if their columns differ in name,
        dtype or axis."""
        if not batches:
            raise ValueError("concat needs at least one batch")

        first = batches[0]
        for other in batches[1:]:
            differing = first._columns.keys() ^ other._columns.keys()
            if differing:
                raise ValueError(f"batches with different columns: {sorted(differing)} not in all")
            first._check_same_fields(other)

        out = Batch(
            torch.cat([b._lengths[Axis.PROMPT] for b in batches]),
            torch.cat([b._lengths[Axis.RESPONSE] for b in batches]),
        )
        for name, (field, _) in first._columns.items():
            out._columns[name] = field, _joined([b._columns[name][1] for b in batches])
        return out

    def _check_same_samples(self, other: "Batch") -> None:
        if any(not torch.equal(self._lengths[axis], other._lengths[axis]) for axis in TOKEN_AXES):
            raise ValueError(
                "batches over different samples cannot be merged: their lengths differ"
            )

    def _check_same_fields(self, other: "Batch") -> None:
        """Raises ValueError if a column that both have differs in dtype or axis."""
        for name, (field, _) in other._columns.items():
            own, _ = self._columns.get(name, (field, None))
            if own != field:
                raise ValueError(
                    f"column '{name}' is {own} in one batch and {field} in another: write the same "
                    f"in both, or declare it with register_field('{name}', dtype=..., axis=...)"
                )

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
        for name, (field, stored) in self._columns.items():
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
            batch._columns[field.name] = field, column
        return batch

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
        shape = tensor.shape[:-1] if field.many else tensor.shape
        if shape == (num_tokens,):
            return tensor

        mask = self.mask(field.axis)
        if shape == mask.shape:
            return tensor[mask]

        raise ValueError(
            f"column '{field.name}' is per {field.axis.value} token: it has shape "
            f"{tuple(tensor.shape)}, expected {tuple(mask.shape)} padded or ({num_tokens},) flat"
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
        return ranges(self._lengths[Axis.SEQUENCE].cumsum(0) - responses, responses)

    def conversation_lengths(self) -> Tensor:
        """Tokens of each conversation of each sample, one after another: int64 `(conversations,)`.
        A conversation attends to no other, even of its own episode."""
        if "forks" not in self or not any(self.flat("forks")):
            return self._lengths[Axis.SEQUENCE]

        prompts = self._lengths[Axis.PROMPT].tolist()
        lengths = self._lengths[Axis.SEQUENCE].tolist()

        found: list[int] = []
        for prompt, length, forks in zip(prompts, lengths, self.flat("forks"), strict=True):
            ends = [0, *(prompt + start for _, start in forks), length]
            found += (after - before for before, after in pairwise(ends))

        return torch.tensor(found, dtype=torch.int64)

    @property
    def row_names(self) -> list[str]:
        """A name of each sample: its uid, with the number of the decision if it is one (see
        `data/decisions.py`)."""
        uids = list(self.flat("uid"))
        if "decision" not in self:
            return uids
        numbers = self.flat("decision").tolist()
        return [f"{uid}/{number}" for uid, number in zip(uids, numbers, strict=True)]

    def speakers(self, agents: Sequence[str]) -> Tensor:
        """The index of the agent in whose conversation each response token is: int64
        `(response tokens,)`. A conversation without an agent's name is the first agent's."""
        number_of = {name: number for number, name in enumerate(agents)}
        owners: list[int] = []
        lengths: list[int] = []
        for length, forks in zip(self._lengths[Axis.RESPONSE].tolist(), self["forks"], strict=True):
            starts = [0, *(start for _, start in forks), length]
            lengths += (end - start for start, end in pairwise(starts))
            names = (name.partition(".")[0] for name, _ in forks)
            owners += (0, *(number_of.get(name, 0) for name in names))

        return repeated(
            torch.tensor(owners, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
        )

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
    if isinstance(column, Tensor | list):
        return column
    return column.read()


def _joined(parts: Sequence[Column | RemoteColumn]) -> Column | RemoteColumn:
    """One column from many, all tensors or all lists. Remote columns are fetched only if some of
    the others are here."""
    remote = [part for part in parts if not isinstance(part, Tensor | list)]
    if parts and len(remote) == len(parts):
        return remote[0].concat(remote[1:])

    here = [_read(part) for part in parts]
    tensors = [part for part in here if isinstance(part, Tensor)]
    if tensors:
        return torch.cat(tensors)

    return list(chain.from_iterable(here))


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
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

    count = "more than one" if fitting else "no"
    wanted = "; ".join(f"{axis.value}: {' or '.join(map(str, shapes[axis]))}" for axis in shapes)
    raise ValueError(
        f"column '{name}' of shape {shape} fits {count} axis of this batch ({wanted}): declare it "
        f"once with register_field('{name}', dtype=..., axis=...)"
    )
