"""What a queue of rows of the data set says will start next, to each of its workers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch
from distflow.observe.writing.timing import Waits
from distflow.runtime.sample_queue.local import LocalSampleQueue
from distflow.runtime.sample_queue.protocol import DroppedGroup, ForeseenGroups, LoadedGroups
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.data_plan import DataPlan, DomainPlan
from distflow.scheduling.group_states import PromptGroup
from distflow.scheduling.ledger import Ledger, timeline
from tests.ledger_audit import verify

ONE: dict[str, Any] = {"num_rows": 11}
THREE: dict[str, Any] = {
    "num_rows": 24,
    "domains": (DomainPlan("a", 12, 3.0), DomainPlan("b", 7, 1.0), DomainPlan("c", 5, 0.5)),
}


class Steps:
    """Steps of 5 groups, which workers load and one rank takes."""

    def __init__(self, ledger: Ledger | None, num_workers: int, **plan: Any) -> None:
        sizes = {"consumer_batch": 5, "group_size": 1, "total_groups": None, "total_steps": 6}
        self.coordinator = Coordinator(DataPlan(**{**sizes, **plan}, loads_rows=True), ledger)
        names = [str(number) for number in range(num_workers)] if num_workers > 1 else [""]
        self.queue = LocalSampleQueue(self.coordinator, Waits(), workers=names)
        self.workers = range(num_workers)

    def ask(self) -> list[list[PromptGroup]]:
        """What each worker is handed while the rank waits for a step."""
        with self.queue._lock, self.queue._waiting(self.coordinator.step):
            return [self.queue.groups_for(worker, None) or [] for worker in self.workers]

    def ask_meanwhile(self) -> list[list[PromptGroup]]:
        """What each worker is handed while the rank trains."""
        return [self.queue.groups_for(worker, None) or [] for worker in self.workers]

    def put(self, groups: Sequence[PromptGroup]) -> None:
        if groups:
            batch = Batch(torch.ones(len(groups)), torch.ones(len(groups)))
            self.queue.end_groups(LoadedGroups.of(groups, batch))

    def take(self) -> None:
        assert self.queue.take(self.coordinator.step, 0) is not None
        self.queue.note_training(self.coordinator.step)

    def release(self) -> None:
        self.queue.release(self.coordinator.step, 0, sent_weights=True)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("plan", [ONE, THREE], ids=["one source", "three domains"])
def test_each_worker_is_told_its_next_groups_once_the_step_was_taken(num_workers, plan, tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        steps = Steps(ledger, num_workers, **plan)
        foreseen: list[list[PromptGroup]] | None = None
        for step in range(6):
            issued = steps.ask()
            assert sum(map(len, issued)) == 5
            assert foreseen is None or issued == foreseen
            for groups in issued:
                steps.put(groups)
            assert not any(steps.ask_meanwhile()), "the rank does not have its samples yet"
            steps.take()
            foreseen = steps.ask_meanwhile()
            if step < 5:
                assert all(isinstance(groups, ForeseenGroups) for groups in foreseen)
            assert not any(steps.ask_meanwhile()), "they were told"
            assert sum(map(len, foreseen)) == (5 if step < 5 else 0)
            steps.release()

    counts = verify(path)
    assert (counts.issued, counts.consumed, counts.running) == (30, 30, 0)
    records = [record for _, record in timeline(path)]
    workers = {record["worker"] for record in records if record["kind"] == "assigned"}
    assert len(workers) == (num_workers if num_workers > 1 else 0)
    lines = path.read_text().count("\n")
    assert lines == 2 + 6 * (3 + num_workers + (num_workers > 1))


def test_rows_that_replace_unusable_ones_are_no_longer_those_foreseen(tmp_path):
    steps = Steps(None, 1, **ONE)
    (issued,) = steps.ask()
    steps.queue.end_groups(DroppedGroup(issued[2], "overlong"))
    steps.put([group for group in issued if group is not issued[2]])
    (more,) = steps.ask()
    assert [group.group_id for group in more] == [5]
    steps.put(more)
    steps.take()
    (foreseen,) = steps.ask_meanwhile()
    assert [group.group_id for group in foreseen] == [6, 7, 8, 9, 10]
    steps.release()
    assert steps.ask() == [foreseen]
