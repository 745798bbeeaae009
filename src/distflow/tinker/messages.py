"""The messages of the Tinker API that are protobuf, as the client's own classes read them (extra
`tinker`)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distflow.data.sample import Segment
from distflow.errors import UserError

_NUMPY = {1: np.float32, 2: np.int64}
"""By the numbers of the protocol's types: floats and integers, the only ones that clients send."""
_MOST_VALUES = 2**26
"""Of one tensor, of which few may be sent if it is sparse."""


Json = dict[str, Any]


class BadRequest(ValueError):
    """A client's mistake. The message names the datum and the field."""


class WorkerLost(UserError):
    """A worker's process has died."""


@dataclass(frozen=True)
class Datum:
    """One sequence, with what its loss reads."""

    token_ids: Tensor
    """int64 `(n,)`."""
    inputs: dict[str, Tensor]
    """`target_tokens`, int64 `(n,)`: what each position is to predict, or `(n, k)` for k tokens
    each. All others are float32 of that shape."""


@dataclass(frozen=True)
class PassRequest:
    """A forward pass over data, and unless it is `forward_only` a backward pass."""

    loss: str
    settings: dict[str, float]
    data: tuple[Datum, ...]
    forward_only: bool


def protocol() -> Any:
    """The message classes. Raises UserError if the extra is not installed."""
    try:
        return import_module("tinker.proto.tinker_public_pb2")
    except ImportError as error:
        raise UserError("--tinker needs the extra: pip install 'distflow[tinker]'") from error


def read_json(content: bytes) -> Json:
    """Raises BadRequest."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error

    if not isinstance(found, dict):
        raise BadRequest("the body is no JSON object")
    return found


def digest_of(request: Json) -> int:
    """The same for the same request, in this process."""
    return hash(json.dumps(request, sort_keys=True))


def parse_pass(body: bytes) -> Any:
    """The message of a `forward_backward`. Raises BadRequest."""
    message = protocol().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's DecodeError, whichever implementation it has
        raise BadRequest(
            "the body is not the protobuf message of forward_backward: clients since 0.25 send it"
        ) from error
    return message


def read_pass(message: Any) -> PassRequest:
    """Raises BadRequest."""
    settings = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise BadRequest(f"loss_fn_config.{name} is a text, not a number")
        settings[name] = value.number

    data = tuple(_read_datum(number, each) for number, each in enumerate(message.data))
    if not data:
        raise BadRequest("the request has no data")
    return PassRequest(message.loss_fn, settings, data, message.forward_only)


def _read_datum(number: int, message: Any) -> Datum:
    tokens = list[Tensor]()
    for chunk in message.model_input:
        kind = chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)
        if kind != "encoded_text":
            raise BadRequest(f"datum {number}: model_input has a chunk of {kind}: only text trains")
        try:
            tokens.append(_read_array(chunk.encoded_text.tokens, np.int32))
        except ValueError as error:
            raise BadRequest(f"datum {number}: model_input is no list of int32") from error

    ids = torch.cat(tokens).long() if tokens else torch.zeros(0, dtype=torch.int64)
    if not len(ids):
        raise BadRequest(f"datum {number}: model_input has no token")

    inputs = {}
    for name, tensor in message.loss_fn_inputs.items():
        values = _read_tensor(f"datum {number}: {name}", tensor)
        if values.ndim not in (1, 2) or not values.numel() or len(values) != len(ids):
            raise BadRequest(
                f"datum {number}: {name} has the shape {tuple(values.shape)}, model_input has "
                f"{len(ids)} tokens"
            )
        if values.dtype != torch.int64 and not bool(values.isfinite().all()):
            raise BadRequest(f"datum {number}: {name} has values that are not finite")
        inputs[name] = values if name == "target_tokens" else values.float()

    targets = inputs.get("target_tokens")
    if targets is None or targets.dtype != torch.int64:
        raise BadRequest(f"datum {number}: target_tokens are missing, or no integers")

    for name, values in inputs.items():
        if values.shape != targets.shape:
            raise BadRequest(
                f"datum {number}: {name} has the shape {tuple(values.shape)}, target_tokens have "
                f"{tuple(targets.shape)}"
            )
    return Datum(ids, inputs)


def _read_tensor(place: str, message: Any) -> Tensor:
    kind = _NUMPY.get(message.dtype)
    is_sparse = message.WhichOneof("encoding") == "sparse_csr"
    if kind is None or not (is_sparse or message.WhichOneof("encoding") == "dense"):
        raise BadRequest(f"{place} is no tensor of float32 or int64")
    if math.prod(message.shape) > _MOST_VALUES:
        raise BadRequest(f"{place} has more than {_MOST_VALUES:,} values")

    try:
        if is_sparse:
            return _read_rows(message.sparse_csr, kind, tuple(message.shape))
        flat = _read_array(message.dense, kind)
        return flat.reshape(tuple(message.shape)) if message.shape else flat
    except (ValueError, RuntimeError, IndexError) as error:
        raise BadRequest(f"{place}: its bytes do not fill its shape") from error


def _read_rows(message: Any, kind: type, shape: tuple[int, ...]) -> Tensor:
    """From the values of a matrix that are not 0. Raises ValueError, RuntimeError, IndexError."""
    values = _read_array(message.values, kind)
    lengths = _read_array(message.crow_indices, np.int64).diff()
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    dense = torch.zeros(shape, dtype=values.dtype)
    dense[rows, _read_array(message.col_indices, np.int64)] = values
    return dense


def _read_array(data: bytes, kind: type) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, kind).copy())


def write_pass(log_probs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """The log-probs of each datum's targets, and metrics of the whole request."""
    message = protocol().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    # a record has one number of targets at each position
    for width, alike in groupby(log_probs, lambda each: each.shape[1:]):
        arrays = [values.float().cpu().numpy() for values in alike]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.dtype = 1
        field.trailing_shape.extend(width)
        field.data = b"".join(array.tobytes() for array in arrays)
        ends = np.cumsum([0, *(array.nbytes for array in arrays)])
        field.offsets = ends.astype(np.int64).tobytes()

    for name, value in metrics.items():
        message.metrics[name] = value
    encoded: bytes = message.SerializeToString()
    return encoded


def write_samples(segments: Sequence[Segment], prompt_log_probs: Tensor | None) -> Any:
    """The message of samples. prompt_log_probs: `(prompt,)`, NaN at the first token."""
    classes = protocol()
    message = classes.SampleResponse(prompt_cache_hit_tokens=segments[0].num_cached_tokens or 0)
    for each in segments:
        sequence = message.sequences.add()
        sequence.stop_reason = classes.STOP_REASON_LENGTH
        if each.finish_reason == "stop":
            sequence.stop_reason = classes.STOP_REASON_STOP
        sequence.tokens = np.asarray(each.token_ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(each.rollout_log_probs, np.float32).tobytes()

    if prompt_log_probs is not None:
        message.prompt_logprobs = prompt_log_probs.numpy().tobytes()
    return message


def write_top(message: Any, ids: Tensor, log_probs: Tensor) -> None:
    """The most likely tokens at each position, `(n, k)`, and their log-probs."""
    message.length, message.k = ids.shape
    message.token_ids = ids.int().numpy().tobytes()
    message.logprobs = log_probs.numpy().tobytes()
