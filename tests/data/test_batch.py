"""Flat columns: what is stored, what is handed out, and that no operation mixes up samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch
from distflow.data.batch_bytes import gather, to_buffers
from distflow.data.sample import Sample, Segment
from distflow.errors import UserError
from distflow.graph.fields import Axis, Field, register_field


def policy(*ids: int) -> Segment:
    return Segment(
        "policy",
        ids,
        tuple(-0.5 * i for i in ids),
        tuple(-0.25 * i for i in ids),
        tuple(7 for _ in ids),
    )


def make(shapes: list[tuple[int, int]]) -> Batch:
    """One sample a `(prompt length, response length)`; token ids are unique over the batch."""
    samples = []
    next_id = 1
    for i, (prompt, response) in enumerate(shapes):
        ids = list(range(next_id, next_id + prompt + response))
        next_id += prompt + response
        segments = [Segment("prompt", tuple(ids[:prompt])), policy(*ids[prompt:])]
        samples.append(
            Sample(f"{i // 2}-{i % 2}", i // 2, segments, prompt=f"p{i}", response=f"r{i}")
        )

    return Batch.from_samples(samples)


shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=7)


def test_tokens_of_tools_are_masked_and_have_no_version() -> None:
    sample = Sample(
        "0-0", 0, [Segment("prompt", (1, 2)), policy(3, 4), Segment("tool", (5,)), policy(6)]
    )
    batch = Batch.from_samples([sample])
    assert batch["response_ids"].tolist() == [[3, 4, 5, 6]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 1]]
    assert batch["versions"].tolist() == [[7, 7, -1, 7]]
    assert batch["rollout_log_probs"].tolist() == [[-1.5, -2.0, 0.0, -3.0]]
    assert batch["sampling_log_probs"].tolist() == [[-0.75, -1.0, 0.0, -1.5]]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6]]


def test_a_policy_segment_without_log_probs_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rollout_log_probs"):
        Segment("policy", (1, 2), (), (), (0, 0))


@given(shapes)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_input_ids_are_prompt_then_response_and_positions_point_at_the_response(
    shape: list[tuple[int, int]],
) -> None:
    batch = make(shape)
    flat = batch.flat("input_ids")
    assert flat.tolist() == list(range(1, len(flat) + 1))
    assert flat[batch.response_positions()].tolist() == batch.flat("response_ids").tolist()


@given(shapes, st.randoms(use_true_random=False))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_select_keeps_each_sample_whole(shape: list[tuple[int, int]], random) -> None:
    batch = make(shape)
    order = [random.randrange(len(shape)) for _ in range(random.randint(1, 9))]
    picked = batch.select(order)

    for row, source in enumerate(order):
        assert picked["prompts"][row] == batch["prompts"][source]
        for name in ("prompt_ids", "response_ids", "rollout_log_probs", "input_ids"):
            axis = batch.field(name).axis
            length = int(batch.lengths(axis)[source])
            assert int(picked.lengths(axis)[row]) == length
            assert picked[name][row, :length].tolist() == batch[name][source, :length].tolist()


@given(shapes, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_chunks_concatenate_to_the_whole(shape: list[tuple[int, int]], num_chunks: int) -> None:
    batch = make(shape)
    chunks = batch.chunk(num_chunks)
    whole = Batch.concat(chunks)
    assert len(chunks) <= num_chunks and all(len(chunk) for chunk in chunks)
    assert whole.names == batch.names
    assert all(_equal(whole.flat(name), batch.flat(name)) for name in batch.names)


def test_columns_that_share_storage_are_saved(tmp_path: Path) -> None:
    batch = make([(2, 3), (1, 4)])
    batch["old_log_probs"] = batch.flat("rollout_log_probs")
    batch.save(tmp_path / "batch.safetensors")
    loaded = Batch.load(tmp_path / "batch.safetensors")
    assert torch.equal(loaded.flat("old_log_probs"), batch.flat("rollout_log_probs"))


@given(shapes)
@settings(max_examples=30, deadline=None)
def test_saved_and_loaded_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shape: list[tuple[int, int]]
) -> None:
    batch = make(shape)
    batch["note"] = [{"text": "é\ud800", "n": i} for i in range(len(batch))]
    path = tmp_path_factory.mktemp("batch") / "batch.safetensors"
    batch.save(path)
    loaded = Batch.load(path)
    assert loaded.names == batch.names
    assert all(_equal(loaded.flat(name), batch.flat(name)) for name in batch.names)


def test_a_moved_batch_has_its_tensors_there_and_its_lengths_here() -> None:
    batch = make([(2, 3), (1, 4)])
    moved = batch.to("meta")
    tensors = [
        moved.flat(name) for name in moved.names if isinstance(moved.flat(name), torch.Tensor)
    ]
    assert {tensor.device.type for tensor in [*tensors, moved.flat("attention_mask")]} == {"meta"}
    assert moved.lengths("sequence").tolist() == [5, 5] and moved["prompts"] == batch["prompts"]
    assert moved.names == batch.names and batch.flat("prompt_ids").device.type == "cpu"


def test_padding_keeps_the_gradient() -> None:
    batch = make([(1, 2), (1, 3), (2, 0)])
    values = torch.arange(5.0, requires_grad=True)
    padded = batch.pad(values, "response")
    assert padded.tolist() == [[0, 1, 0], [2, 3, 4], [0, 0, 0]]
    (padded[batch.mask("response")] * torch.tensor([1.0, 2, 3, 4, 5])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1, 2, 3, 4, 5]


def test_padding_of_a_written_column_is_not_stored() -> None:
    batch = make([(1, 1), (1, 3)])
    batch["advantages"] = torch.tensor([[1.0, math.nan, math.nan], [2, 3, 4]])
    assert batch.flat("advantages").tolist() == [1, 2, 3, 4]
    assert batch["advantages"].tolist() == [[1, 0, 0], [2, 3, 4]]


def test_loss_mask_leaves_out_invalid_samples() -> None:
    batch = make([(1, 2), (1, 1)])
    batch["valid"] = torch.tensor([True, False])
    assert batch["loss_mask"].tolist() == [[1, 1], [0, 0]]
    batch["loss_mask"] = torch.zeros(2, 2)
    assert batch["loss_mask"].sum() == 0


def test_aliases_are_the_same_column() -> None:
    batch = make([(1, 1), (1, 1), (1, 1)])
    assert batch["index"].tolist() == batch["group_index"].tolist() == [0, 0, 1]
    batch["data_source"] = ["a", "b", "c"]
    assert batch["domain"] == ["a", "b", "c"]


def test_columns_are_copied_by_name() -> None:
    """A registered name decides the dtype; columns that nobody declared keep their axis, even where
    shapes fit two."""
    left = make([(2, 2), (1, 1)])
    scored = make([(2, 2), (1, 1)])
    scored["log_probs"] = torch.tensor([-1.0, -2.0, -3.0])
    scored["own"] = ["a", "b"]
    left.copy_columns(
        scored, old_log_probs="log_probs", mine="own", index="group_index", values="prompt_ids"
    )
    assert left["old_log_probs"].tolist() == [[-1.0, -2.0], [-3.0, 0.0]] and "log_probs" not in left
    assert left["mine"] == ["a", "b"] and left.field("values").dtype == "float32"
    with pytest.raises(KeyError, match="no column 'entropy'"):
        left.copy_columns(scored, old_log_probs="entropy")
    with pytest.raises(ValueError, match="lengths differ"):
        left.copy_columns(make([(2, 3), (1, 1)]), old_log_probs="versions")


def test_merge_takes_the_columns_of_both() -> None:
    left = make([(1, 2)])
    right = make([(1, 2)]).only(["uid"])
    right["returns"] = torch.tensor([[5.0, 6.0]])
    right["prompts"] = ["other"]
    merged = left.merge(right)
    assert (
        merged["returns"].tolist() == [[5, 6]]
        and merged["prompts"] == ["other"]
        and "versions" in merged
    )
    with pytest.raises(ValueError, match="lengths differ"):
        left.merge(make([(1, 3)]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "advantages",
            torch.zeros(2, 9),
            r"'advantages' .*\(2, 9\), .*\(2, 3\) .*\(4,\)",
        ),
        ("valid", torch.zeros(3, dtype=torch.bool), r"'valid' .*\(3,\), .*\(2,\)"),
        ("domain", ["a"], "'domain' .* 1 entries .* 2 samples"),
        (
            "mine",
            torch.zeros(7, 7),
            r"'mine' .*\(7, 7\) .* no axis .*prompt: \(2, 2\) or \(4,\).*register_field",
        ),
    ],
)
def test_a_column_of_a_wrong_shape_is_refused(name: str, value: object, message: str) -> None:
    batch = make([(2, 1), (2, 3)])
    with pytest.raises(ValueError, match=message):
        batch[name] = value


def test_an_unknown_column_names_those_that_are_there() -> None:
    with pytest.raises(KeyError, match="'advantage'; .* uid, prompts"):
        make([(1, 1)])["advantage"]


def test_concat_refuses_different_columns() -> None:
    other = make([(1, 1)])
    other["extra"] = ["x"]
    with pytest.raises(ValueError, match=r"\['extra'\]"):
        Batch.concat([make([(1, 1)]), other])


@dataclass
class Elsewhere:
    """A `RemoteColumn` of one number per sample, which records that it was read."""

    values: list[float]
    reads: list[str]

    def read(self) -> torch.Tensor:
        self.reads.append("read")
        return torch.tensor(self.values)

    def select(self, rows: Sequence[int]) -> "Elsewhere":
        return Elsewhere([self.values[row] for row in rows], self.reads)

    def concat(self, others: Sequence["Elsewhere"]) -> "Elsewhere":
        values = list(self.values)
        for other in others:
            values += other.values
        return Elsewhere(values, self.reads)


def test_a_remote_column_is_passed_on_without_being_read(tmp_path: Path) -> None:
    reads: list[str] = []
    scores = Field("scores", "float32", Axis.SAMPLE)
    lengths = (torch.tensor([1, 2, 1]), torch.tensor([2, 1, 3]))
    batch = Batch.from_columns(*lengths, [(scores, Elsewhere([1.0, 2.0, 3.0], reads))])
    picked = batch.select([2, 0]).merge(batch.select([2, 0]).only(["scores"]))
    both = Batch.concat([picked, batch])
    both.copy_columns(both.copy(), values_copied="scores")
    assert not reads and dict(both.columns()).keys() == {scores, both.field("values_copied")}
    assert both["values_copied"].tolist() == [3.0, 1.0, 1.0, 2.0, 3.0] and reads == ["read"]
    here = picked.to("cpu")
    assert [column.tolist() for _, column in here.columns()] == [[3.0, 1.0]]
    assert Batch.concat([batch, here])["scores"].tolist() == [1.0, 2.0, 3.0, 3.0, 1.0]
    both.save(tmp_path / "batch")
    assert Batch.load(tmp_path / "batch")["scores"].tolist() == [3.0, 1.0, 1.0, 2.0, 3.0]


def _equal(left: object, right: object) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_keys_of_a_sample_are_columns() -> None:
    segments = [Segment("prompt", (1,)), policy(2)]
    batch = Batch.from_samples(
        [
            Sample("4-0", 4, segments, episode=0),
            Sample("4-1", 4, segments, episode=0, agent="judge"),
        ]
    )
    assert batch["episode_index"].tolist() == [0, 0] and batch["agent"] == ["policy", "judge"]


@pytest.mark.parametrize(
    ("shapes", "value", "axes"),
    [
        ([(3, 1), (3, 1)], torch.zeros(2), ("sample", "response")),
        ([(3, 3), (3, 1)], torch.zeros(2, 3), ("prompt", "response")),
        ([(2, 1), (1, 2)], torch.zeros(3), ("prompt", "response")),
        ([], torch.zeros(0), ("sample", "prompt", "response", "sequence")),
    ],
)
def test_an_unknown_column_that_fits_two_axes_is_refused(
    shapes: list[tuple[int, int]], value: torch.Tensor, axes: tuple[str, ...]
) -> None:
    batch = make(shapes)
    with pytest.raises(
        ValueError, match=r"'mine' of shape .* more than one axis .*register_field\('mine'"
    ) as error:
        batch["mine"] = value

    assert all(f"{axis}: (" in str(error.value) for axis in axes)
    assert "mine" not in batch


@pytest.mark.parametrize(
    ("value", "axis"),
    [(torch.ones(2), Axis.SAMPLE), (torch.ones(2, 4), Axis.RESPONSE), (torch.ones(3), Axis.PROMPT)],
)
def test_an_unknown_column_that_fits_one_axis_is_that(value: torch.Tensor, axis: Axis) -> None:
    batch = make([(1, 4), (2, 1)])
    batch["mine"] = value
    batch["mine"] = value.long()
    assert batch.field("mine") == Field("mine", "float32", axis)


def test_a_registered_column_is_never_guessed() -> None:
    register_field("per_prompt_token_of_this_test", "int64", "prompt")
    batch = make([(3, 3), (3, 1)])
    batch["per_prompt_token_of_this_test"] = torch.arange(6)
    assert batch["per_prompt_token_of_this_test"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_batches_meet_only_where_their_fields_are_the_same(tmp_path: Path) -> None:
    """Each was told by its shape alone: of prompts here, of responses there."""
    one, other, third = make([(1, 2)]), make([(2, 1)]), make([(2, 1)])
    one["mine"] = torch.ones(1, 2)
    other["mine"] = torch.ones(1, 2)
    third["mine"] = torch.ones(1, 2).long()

    for meet in (
        lambda: Batch.concat([one, other]),
        lambda: Batch.concat([one.select([0]), other.select([0])]),
    ):
        with pytest.raises(
            ValueError,
            match="'mine' is float32 per response .* float32 per prompt",
        ):
            meet()

    with pytest.raises(
        ValueError,
        match="'mine' is float32 per prompt .* int64 per prompt",
    ):
        other.merge(third)

    other.save(tmp_path / "other")
    loaded = Batch.load(tmp_path / "other")
    assert loaded.field("mine") == other.field("mine")
    with pytest.raises(ValueError, match="'mine' is float32 per response .* float32 per prompt"):
        Batch.concat([one, loaded])


def test_each_response_token_knows_the_agent_in_whose_conversation_it_is() -> None:
    batch = Batch(torch.tensor([1, 1, 1]), torch.tensor([5, 3, 2]))
    batch["forks"] = [[["checker", 2], ["solver.1", 4]], [], [["judge.2.1", 1]]]
    speakers = batch.speakers(["solver", "checker", "judge"])
    assert speakers.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 2]


@given(shapes, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_entries_of_a_token_stay_with_it(
    shape: list[tuple[int, int]], num_entries: int, random
) -> None:
    batch = make(shape)
    ids = batch.flat("response_ids")
    batch["teacher_top_ids"] = ids[:, None] * 10 + torch.arange(num_entries)

    order = [random.randrange(len(shape)) for _ in range(random.randint(1, 6))]
    moved = Batch.concat([batch.select(order), batch])
    through = gather([to_buffers(moved)], [(0, row) for row in range(len(moved))])
    for found in (moved, through):
        entries = found.flat("teacher_top_ids")
        assert entries.shape == (len(found.flat("response_ids")), num_entries)
        assert torch.equal(entries // 10, found.flat("response_ids")[:, None].expand_as(entries))

    padded = batch["teacher_top_ids"]
    assert torch.equal(padded[..., 0], batch["response_ids"] * 10)
    batch["teacher_top_ids"] = padded
    assert torch.equal(batch["teacher_top_ids"], padded)


def test_entries_of_a_token_are_refused_in_a_column_of_single_numbers() -> None:
    batch = make([(1, 2), (1, 3)])
    with pytest.raises(ValueError, match="advantages"):
        batch["advantages"] = torch.zeros(5, 2)
    with pytest.raises(ValueError, match="teacher_top_ids"):
        batch["teacher_top_ids"] = torch.zeros(4, 2, dtype=torch.int64)


def with_top(*ids: int) -> Segment:
    """A reply whose likeliest tokens name it: 10 and 11 times each id."""
    top_ids = tuple((10 * each, 11 * each) for each in ids)
    top_log_probs = tuple((-each, -each - 1) for each in ids)
    return replace(policy(*ids), top_ids=top_ids, top_log_probs=top_log_probs)


def test_likeliest_tokens_are_those_of_their_draw_between_tokens_of_others() -> None:
    replies = [with_top(3, 4), Segment("tool", (5, 5)), with_top(6)]
    forked = [Segment("prompt", (7,)), with_top(8), Segment("unused", (9,))]
    first = Sample("0-0", 0, [Segment("prompt", (1, 2)), *replies, *forked], forks=(("1", 5),))
    second = Sample("0-1", 0, [Segment("prompt", (1, 2)), Segment("tool", (5,))])
    batch = Batch.from_samples([second, first], num_top=2)

    drawn = batch.flat("response_mask") > 0
    ids = batch.flat("top_ids")
    assert ids.shape == (9, 2)
    assert drawn.tolist() == [False, True, True, False, False, True, False, True, False]
    assert ids[drawn].tolist() == [[30, 33], [40, 44], [60, 66], [80, 88]]
    assert batch.flat("top_log_probs")[drawn].tolist() == [[-3, -4], [-4, -5], [-6, -7], [-8, -9]]
    assert bool((batch.flat("top_log_probs")[~drawn] == -math.inf).all())

    alone = Batch.from_samples([second], num_top=2)
    assert Batch.concat([alone, batch.select([1])]).flat("top_ids").tolist() == ids.tolist()


def test_an_engine_without_the_likeliest_tokens_is_refused() -> None:
    sample = Sample("0-0", 0, [Segment("prompt", (1, 2)), policy(3, 4)])
    with pytest.raises(UserError, match="the 2 likeliest tokens"):
        Batch.from_samples([sample], num_top=2)


def test_a_part_of_a_reply_has_all_columns_of_its_tokens() -> None:
    part = with_top(3, 4, 5).part(slice(1, 3))
    assert part == with_top(4, 5)
    with pytest.raises(ValueError, match="1 top_ids"):
        replace(part, top_ids=part.top_ids[:1])
