"""Workers that are replaced while the trainer waits for those before them."""

from collections.abc import Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from distflow.cluster import weights_to_workers
from distflow.cluster.weights_to_workers import WeightReceivers
from distflow.scheduling.group_states import Version

VERSION = Version(0, 3)
OLD, NEW = object(), object()


def test_a_version_that_the_worker_before_has_loaded_is_not_that_of_its_replacement():
    workers = WeightReceivers(lambda message: None)
    workers.join(1, OLD)
    workers.join(1, NEW)
    workers.loaded(1, OLD, VERSION)
    assert workers.without(VERSION) == {1: NEW} and not workers.with_newest_weights()
    workers.loaded(1, NEW, VERSION)
    assert not workers.without(VERSION) and workers.with_newest_weights() == {1: NEW}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_worker_that_dies_or_is_late_takes_nothing_from_its_replacement(monkeypatch, is_late):
    def wait(
        refs: Sequence[object], timeout: float | None
    ) -> tuple[Sequence[object], Sequence[object]]:
        return ([], refs) if is_late else (refs, [])

    def reply(ref: object) -> Any:
        raise RayActorError

    killed: list[object] = []
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(weights_to_workers, "reply", reply)
    monkeypatch.setattr(weights_to_workers, "kill", killed.append)
    workers = WeightReceivers(lambda message: None)
    workers.join(1, NEW)
    assert workers.replies({1: OLD}, {1: "ref"}, "the weights of step 3", 0.0) == {}
    assert workers.without(VERSION) == {1: NEW} and killed == [OLD] * is_late
