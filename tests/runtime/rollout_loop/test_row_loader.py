"""Rows of the data set that start together are loaded as one batch, and accounted for one by
one."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from distflow.data.encoded_prompts import PromptRow, UnusableRow
from distflow.launch.run_folders.groups_of_step import step_lineage
from distflow.pipelines.nodes.sample_responses import pair_of_row, response_of_row
from distflow.runtime.rollout_loop.row_loader import RowLoader
from distflow.runtime.sample_queue.protocol import LoadedGroups
from distflow.scheduling.group_states import PromptGroup
from distflow.scheduling.ledger import timeline
from tests.e2e.runs import Playground
from tests.ledger_audit import verify
from tests.tiny_models import tiny_tokenizer

ROWS = [
    PromptRow(i, (3 + i, 4), "ab", response_ids=(5, 6, 7)[: 1 + i % 3], rejected_ids=(8,))
    for i in range(8)
]


def groups(*rows: int, version: int = 2, size: int = 1) -> list[PromptGroup]:
    return [PromptGroup(100 + place, 0, row, size, version) for place, row in enumerate(rows)]


def loader(rows: Sequence[PromptRow] = ROWS, load: Any = response_of_row) -> RowLoader:
    return RowLoader(rows, load, tiny_tokenizer())


def columns(loaded: LoadedGroups[Batch]) -> dict[str, Any]:
    stored = loaded.data.to_tensors()
    return {name: tensor.tolist() for name, tensor in stored.items()}


@pytest.mark.parametrize(("load", "size"), [(response_of_row, 1), (pair_of_row, 2)])
def test_groups_loaded_ahead_are_those_loaded_when_they_start(load, size):
    ahead = loader(load=load)
    wanted = groups(4, 0, 7, size=size)
    ahead.load_ahead(groups(4, 0, 7, size=size))
    at_start = loader(load=load).load(wanted).groups
    ahead.rows = []  # nothing is read again
    assert columns(ahead.load(wanted).groups) == columns(at_start)
    assert [len(each.rows or ()) for each in at_start.finished] == [size] * 3
    part = ahead.load(wanted[1:]).groups
    last = at_start.data.select(range(size, 3 * size))
    assert columns(part) == columns(LoadedGroups.of(part.prompt_groups, last))


def test_groups_that_others_start_in_place_of_are_not_those_loaded_ahead():
    ahead = loader()
    ahead.load_ahead(groups(4, 0, version=1))
    later = ahead.load(groups(4, 0, version=2)).groups
    assert torch.equal(later.data.flat("versions").unique(), torch.tensor([2]))


def test_an_unusable_row_is_left_out_alone():
    class Rows(list[PromptRow]):
        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                raise UnusableRow("overlong", "row 3")
            return super().__getitem__(index)

    loaded = loader(Rows(ROWS)).load(groups(2, 3, 4))
    assert [group.row for group in loaded.groups.prompt_groups] == [2, 4] and len(
        loaded.groups.data
    ) == 2
    assert [(group.row, error.reason) for group, error in loaded.unusable] == [(3, "overlong")]


def test_each_row_of_fine_tuning_is_accounted_for_although_a_step_has_one_record(tmp_path):
    """11 rows in steps of 4, two epochs: steps cross the epoch, and the last is short."""
    off = (
        "~reward.functions",
        "~reward.num_workers",
        "~custom_reward_function.path",
        "~actor_rollout_ref.rollout.n",
    )
    keys = ("data.response_key=answer", "data.train_batch_size=4", "trainer.total_epochs=2")
    run = Playground(tmp_path, num_rows=11).run("sft", *off, *keys)
    path = run.folder / "ledger.jsonl"
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("issued") == kinds.count("complete") == kinds.count("consumed") == 6
    counts = verify(path)
    assert (counts.issued, counts.consumed, counts.running, counts.complete) == (22, 22, 0, 0)
    issued = [record for _, record in timeline(path) if record["kind"] == "issued"]

    for epoch in (0, 1):
        assert sorted(record["row"] for record in issued if record["epoch"] == epoch) == list(
            range(11)
        )

    lineage = step_lineage(path, 3)
    assert [group.group_id for group in lineage.groups] == [8, 9, 10, 11]
    assert [group.row for group in lineage.groups] == [record["row"] for record in issued[8:12]]
    assert all(group.tokens and group.completed for group in lineage.groups)
