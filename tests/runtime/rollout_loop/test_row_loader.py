"""Rows of the data set that start together are loaded as one batch, and accounted for one by
one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distflow.data.encoded_prompts import PromptRow, UnusableRow
from distflow.launch.run_folders.groups_of_step import step_lineage
from distflow.pipelines.nodes.rollout_reward_filter import response_of_row
from distflow.runtime.rollout_loop.row_loader import RowLoader
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


def loader(rows: Sequence[PromptRow]) -> RowLoader:
    return RowLoader(rows, response_of_row, tiny_tokenizer())


def test_an_unusable_row_is_left_out_alone() -> None:
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


def test_each_row_of_fine_tuning_is_accounted_for_although_a_step_has_one_record(
    tmp_path: Path,
) -> None:
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
