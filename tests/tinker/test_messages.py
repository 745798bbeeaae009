"""Requests as clients send them, read by their own message classes: sound ones, and wrong ones that
are named."""

from typing import Any

import numpy as np
import pytest
import torch

from distflow.tinker.messages import BadRequest, parse_pass, read_pass, write_pass

tinker = pytest.importorskip("tinker")
pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
convert = pytest.importorskip("tinker.proto.request_conv")
answers = pytest.importorskip("tinker.proto.response_conv")

IDS = [5, 6, 7]
INTEGERS = 2
FLOATS = 1


def message(**inputs: Any) -> Any:
    """Of one datum, as the client writes it."""
    datum = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(IDS),
        loss_fn_inputs={"target_tokens": [6, 7, 8]} | inputs,
    )
    given = tinker.types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = tinker.types.ForwardBackwardRequest(
        model_id="m", seq_id=1, forward_backward_input=given
    )
    return convert.forward_backward_request_to_proto(request)


def weights_of(sent: Any) -> torch.Tensor:
    return read_pass(parse_pass(sent.SerializeToString())).data[0].inputs["weights"]


def test_tensors_come_dense_or_sparse() -> None:
    matrix = torch.zeros(3, 5)
    matrix[0, 1] = 0.5
    matrix[2, 4] = 0.25
    targets = torch.arange(15).reshape(3, 5)
    dense = tinker.TensorData.from_torch(matrix)
    sparse = tinker.TensorData.from_torch_sparse(matrix)
    assert sparse.sparse_crow_indices is not None

    for given in (dense, sparse):
        found = weights_of(
            message(target_tokens=tinker.TensorData.from_torch(targets), weights=given)
        )
        assert torch.equal(found, matrix)


def damage(change: Any) -> Any:
    """The message of one datum with weights, changed."""
    sent = message(weights=[1.0, 0.0, 1.0])
    change(sent.data[0], sent.data[0].loss_fn_inputs["weights"])
    return sent


def sparse(shape: list[int], starts: list[int], columns: list[int]) -> Any:
    def change(datum: Any, weights: Any) -> None:
        weights.shape[:] = shape
        weights.sparse_csr.values = np.ones(len(columns), np.float32).tobytes()
        weights.sparse_csr.crow_indices = np.array(starts, np.int64).tobytes()
        weights.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()

    return change


def cut_bytes(datum: Any, weights: Any) -> None:
    weights.dense = weights.dense[:-1]


def wrong_shape(datum: Any, weights: Any) -> None:
    weights.shape[:] = [2, 2]


def too_deep(datum: Any, weights: Any) -> None:
    weights.shape[:] = [3, 1, 1]


def other_type(datum: Any, weights: Any) -> None:
    weights.dtype = 3


def infinite(datum: Any, weights: Any) -> None:
    weights.dense = np.array([1, np.inf, 0], np.float32).tobytes()


def cut_tokens(datum: Any, weights: Any) -> None:
    datum.model_input[0].encoded_text.tokens = b"\x01\x00"


def no_tokens(datum: Any, weights: Any) -> None:
    del datum.model_input[:]


def no_targets(datum: Any, weights: Any) -> None:
    del datum.loss_fn_inputs["target_tokens"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (cut_bytes, "datum 0: weights.*bytes"),
        (wrong_shape, "datum 0: weights.*bytes"),
        (too_deep, r"datum 0: weights .*\(3, 1, 1\)"),
        (other_type, "datum 0: weights .*float32"),
        (infinite, "datum 0: weights .*finite"),
        (cut_tokens, "datum 0: model_input"),
        (no_tokens, "datum 0: model_input"),
        (no_targets, "datum 0: target_tokens"),
        (sparse([3, 2], [0, 1, 1, 2], [0, 1]), r"datum 0: weights .*\(3, 2\)"),
        (sparse([3, 2], [0, 1, 1, 2], [0, 9]), "datum 0: weights.*bytes"),
        (sparse([3, 2], [0, 2, 1, 2], [0, 1]), "datum 0: weights.*bytes"),
        (sparse([3, 2**30], [0, 1, 1, 2], [0, 1]), "datum 0: weights .*67,108,864"),
    ],
)
def test_a_wrong_datum_is_named(change: Any, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        read_pass(damage(change))


def test_a_body_of_another_kind_is_no_message() -> None:
    for body in (b'{"model_id": "m"}', b"\xff\xff"):
        with pytest.raises(BadRequest, match="protobuf"):
            parse_pass(body)


def test_a_pass_without_data_is_refused() -> None:
    with pytest.raises(BadRequest, match="no data"):
        read_pass(pb.ForwardBackwardRequest(model_id="m", seq_id=1))


def test_log_probs_keep_their_shapes_and_order() -> None:
    """Whatever number of targets a position has."""
    sent = [torch.rand(3), torch.rand(2), torch.rand(4, 2), torch.rand(1), torch.rand(2, 3)]
    read = answers.deserialize_forward_backward_output(write_pass(sent, {"loss:sum": 2.0}))
    assert read.metrics == {"loss:sum": 2.0}
    for own, given in zip(read.loss_fn_outputs, sent, strict=True):
        assert torch.equal(own["logprobs"].to_torch(), given)
