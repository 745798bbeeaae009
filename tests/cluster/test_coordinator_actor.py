"""The coordinator's own methods, called on many threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from distflow.cluster.coordinator_actor import CoordinatorActor
from distflow.observe.writing.timing import Waits
from distflow.runtime.sample_queue.queue_base import SharedSampleQueue
from tests.runtime.groups import coordinator


def test_progress_is_not_read_while_a_move_is_half_done():
    """The counts by reason may grow while they are read."""
    actor = object.__new__(CoordinatorActor)
    SharedSampleQueue.__init__(actor, coordinator(), Waits())

    with ThreadPoolExecutor(1) as threads:
        with actor._lock:
            asked = threads.submit(actor.progress)
            with pytest.raises(TimeoutError):
                asked.result(0.2)
        assert asked.result(60).version.step == 0
