"""The account of decoding: stretches without a gap."""

from distflow.rollout.engine import Activity, ActivityLog


def test_a_stretch_that_is_taken_under_way_leaves_no_gap_whatever_comes_next() -> None:
    log = ActivityLog()
    log.decoded(1.0, 2.0, 0, "train", 5)
    assert log.take() == [Activity(1.0, 2.0, 0, "train", 5)]
    log.decoded(2.5, 3.0, 1, "train", 7)
    log.decoded(3.0, 4.0, 1, "train", 1)
    assert log.take() == [Activity(2.0, 4.0, 1, "train", 8)]
    log.stopped()
    log.decoded(6.0, 7.0, 1, "train", 2)
    assert log.take() == [Activity(6.0, 7.0, 1, "train", 2)] and log.take() == []
