"""Groups on their way from worker to worker."""

from collections.abc import Sequence
from typing import Any

from distflow.cluster import remote_sample_queue
from distflow.cluster.remote_sample_queue import GroupLost, RowsOfGroup, read_groups
from distflow.data.batch import Batch
from distflow.data.batch_bytes import to_buffers
from tests.runtime.groups import group


def test_groups_that_only_came_too_late_are_not_lost(monkeypatch):
    """Ray says of a slow fetch what it says of a lost object."""
    calls = list[int]()

    def fetched(groups: Sequence[Any]) -> Sequence[Any]:
        calls.append(len(groups))
        if len(calls) == 1:
            raise GroupLost("too slow")
        return groups

    monkeypatch.setattr(remote_sample_queue, "_fetched", fetched)
    batch, lost = read_groups((3, 4), [to_buffers(group(3)), to_buffers(group(4))])
    assert lost == [] and batch is not None and batch["uid"] == ["3-0", "3-1", "4-0", "4-1"]
    assert calls == [2, 1, 1, 2]


def test_groups_that_are_stored_together_are_read_in_the_order_asked_for():
    one = to_buffers(Batch.concat([group(3), group(5)]))
    other = to_buffers(Batch.concat([group(4), group(6)]))
    first, second = range(2), range(2, 4)
    stored = [RowsOfGroup(one, first), RowsOfGroup(other, first), RowsOfGroup(one, second)]
    batch, lost = read_groups((3, 4, 5, 7), [*stored, to_buffers(group(7))])
    assert lost == [] and batch is not None
    assert batch["uid"] == [f"{number}-{i}" for number in (3, 4, 5, 7) for i in range(2)]
