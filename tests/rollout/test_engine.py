"""The account of decoding: stretches without a gap."""

from dataclasses import replace
from types import SimpleNamespace

from distflow.data.sample import Segment
from distflow.rollout import engine
from distflow.rollout.engine import Activity, ActivityLog, RequestLog, Stream
from tests.rollout.drive import request_of


def test_a_stretch_that_is_taken_under_way_leaves_no_gap_whatever_comes_next():
    log = ActivityLog()
    log.decoded(1.0, 2.0, 0, "train", 5)
    assert log.take() == [Activity(1.0, 2.0, 0, "train", 5)]
    log.decoded(2.5, 3.0, 1, "train", 7)
    log.decoded(3.0, 4.0, 1, "train", 1)
    assert log.take() == [Activity(2.0, 4.0, 1, "train", 8)]
    log.stopped()
    log.decoded(6.0, 7.0, 1, "train", 2)
    assert log.take() == [Activity(6.0, 7.0, 1, "train", 2)] and log.take() == []


def test_whole_responses_take_the_time_in_which_a_request_is_open(monkeypatch):
    clock = iter((1.0, 3.0, 5.0, 8.0, 9.0))
    monkeypatch.setattr(engine, "time", SimpleNamespace(time=lambda: next(clock)))
    request = replace(request_of((1,)), stream=Stream(1, "train/fork a", 0, 0))
    log = RequestLog()

    def respond(num_tokens: int, version: int) -> None:
        zeros = [0.0] * num_tokens
        versions = [version] * num_tokens
        response = Segment.drawn(0, [5] * num_tokens, zeros, zeros, versions, "stop")
        log.responded(request, (response, response))

    with log.busy():
        with log.busy():
            respond(2, version=4)
        respond(1, version=4)

    with log.busy():
        respond(3, version=4)

    assert log.take() == [Activity(1.0, 5.0, 4, "train", 6), Activity(8.0, 9.0, 4, "train", 6)]
