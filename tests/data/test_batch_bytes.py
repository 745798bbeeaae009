"""What travels between processes: every batch comes back exactly, from memory that may not be
written to."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch
from distflow.data.batch_bytes import Buffers, gather, to_buffers
from distflow.graph.fields import TOKEN_AXES, Axis, Field

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def columns(draw: st.DrawFn) -> list[tuple[str, str, Axis]]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), max_size=5, unique=True))
    return [
        (f"my {name}", draw(st.sampled_from(DTYPES)), draw(st.sampled_from(list(Axis))))
        for name in names
    ]


@st.composite
def batches(
    draw: st.DrawFn, wanted: list[tuple[str, str, Axis]] | None = None, max_samples: int = 5
) -> Batch:
    """Samples of any lengths, 0 too, with columns of any dtype and axis that nobody registered."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=max_samples))
    prompts = torch.tensor([prompt for prompt, _ in lengths], dtype=torch.int64)
    responses = torch.tensor([response for _, response in lengths], dtype=torch.int64)
    tokens = Batch(prompts, responses)

    made: list[tuple[Field, torch.Tensor | list[object]]] = []
    for name, dtype, axis in draw(columns()) if wanted is None else wanted:
        if axis is Axis.OBJECT:
            made.append((Field(name, "object", axis), [draw(values) for _ in lengths]))
            continue

        size = int(tokens.lengths(axis).sum()) if axis in TOKEN_AXES else len(lengths)
        numbers = torch.tensor(
            draw(st.lists(st.floats(-200, 200), min_size=size, max_size=size)), dtype=torch.float64
        )
        made.append((Field(name, dtype, axis), numbers.to(getattr(torch, dtype))))

    return Batch.from_columns(prompts, responses, made)


def frozen(buffers: Buffers) -> Buffers:
    """As they arrive: nobody may write to them."""
    arrived = {name: array.copy() for name, array in buffers.items()}
    for array in arrived.values():
        array.flags.writeable = False
    return arrived


def assert_same(one: Batch, other: Batch) -> None:
    assert one.names == other.names
    assert all(torch.equal(one.lengths(axis), other.lengths(axis)) for axis in TOKEN_AXES)

    for name in one.names:
        assert one.field(name) == other.field(name)
        ours = one.flat(name)
        theirs = other.flat(name)

        if isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype and torch.equal(
                ours.view(torch.uint8), theirs.view(torch.uint8)
            )
        else:
            assert repr(ours) == repr(theirs)  # NaN is no NaN's equal


def whole(buffers: Buffers) -> Batch:
    return gather([buffers], [(0, row) for row in range(buffers["lengths.prompt"].size // 8)])


@given(batches())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_batch_comes_back_exactly(batch: Batch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = whole(frozen(to_buffers(batch)))
    assert_same(arrived, batch)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_rows_of_several_parts_are_what_select_of_their_concatenation_gives(
    data: st.DataObject,
) -> None:
    wanted = data.draw(columns())
    parts = data.draw(st.lists(batches(wanted), min_size=1, max_size=3))
    rows = [(part, row) for part, batch in enumerate(parts) for row in range(len(batch))]
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    found = gather([frozen(to_buffers(part)) for part in parts], [rows[i] for i in order])
    assert_same(found, Batch.concat(parts).select(order))


def test_what_arrives_is_ones_own() -> None:
    batch = Batch(torch.tensor([1, 2]), torch.tensor([2, 1]))
    batch["response_ids"] = torch.tensor([3, 4, 5])
    buffers = to_buffers(batch)
    arrived = whole(buffers)
    arrived.flat("response_ids").add_(1)
    assert batch.flat("response_ids").tolist() == [3, 4, 5]
    assert whole(buffers).flat("response_ids").tolist() == [3, 4, 5]


def test_texts_with_newlines_commas_and_lone_surrogates_stay_rows_of_their_own() -> None:
    texts = ['a,"b"],[', "\n\u2028", "\ud800", "", "é" * 3]
    batch = Batch(torch.ones(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64))
    batch["mine"] = texts
    found = gather([to_buffers(batch)], [(0, row) for row in (4, 2, 0, 1, 3)])
    assert found["mine"] == [texts[row] for row in (4, 2, 0, 1, 3)]


def test_no_rows_still_have_their_columns() -> None:
    batch = Batch(torch.tensor([1]), torch.tensor([2]))
    batch["mine"] = ["text"]
    batch["scores"] = torch.tensor([math.inf])
    empty = gather([to_buffers(batch)], [])
    assert len(empty) == 0 and empty.names == ("mine", "scores")
    assert_same(Batch.concat([empty, batch]), batch)


def test_an_object_that_is_no_json_is_refused() -> None:
    batch = Batch(torch.tensor([1]), torch.tensor([2]))
    batch["mine"] = [object()]
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_buffers(batch)


def test_parts_of_different_columns_are_refused_by_name() -> None:
    parts = []
    for dtype in (torch.int64, torch.float32):
        batch = Batch(torch.tensor([1]), torch.tensor([2]))
        batch["mine"] = torch.ones(2, dtype=dtype)
        parts.append(to_buffers(batch))

    with pytest.raises(ValueError, match="column 'mine'"):
        gather(parts, [(0, 0), (1, 0)])
    assert gather(parts, [(1, 0)]).flat("mine").tolist() == [1.0, 1.0]


def test_buffers_hold_bytes_alone() -> None:
    batch = Batch(torch.tensor([1]), torch.tensor([2]))
    batch["mine"] = ["text"]
    assert all(array.dtype == np.uint8 and array.ndim == 1 for array in to_buffers(batch).values())
